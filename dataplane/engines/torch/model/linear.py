"""Linear layers of a CPU: in float32 by the quicker of two libraries, and those that have one input as one product.

torch itself multiplies float32 by MKL, whose kernels depend on the maker of the CPU. On one thread of an AMD CPU with
AVX-512 oneDNN takes 0.4 to 0.95 of its time for 2 to 512 rows, and as long for one; on an Intel CPU it is MKL that
takes 0.54 to 0.97 of oneDNN's time with fewer than 1,024 inputs, and 0.58 to 0.98 for up to 3 rows with more; for 4 and
8 rows it takes 1.1 to 1.9 there. Both read the weights where they lie. A call costs 10 us, as much as the product of a
small layer, so layers are merged whose weights lie one behind another:

    weights   | q_proj | k_proj | v_proj | o_proj | ...      read as one of [q + k + v outputs, inputs]
    call      q_proj(x) computes all three, k_proj(x) and v_proj(x) return theirs
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

HAS_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
_CPU_INFO = Path("/proc/cpuinfo")
FEW_INPUTS, FEW_ROWS = 1024, 3
"""MKL is the quicker one on an Intel CPU below so many inputs, and up to so many rows."""
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that transformers calls with one input, one after another."""


def _has_fast_mkl() -> bool:
    """Whether the CPU is one of those for which MKL has kernels of its own."""
    is_intel = _CPU_INFO.is_file() and "GenuineIntel" in _CPU_INFO.read_text()
    return is_intel and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


HAS_FAST_MKL = _has_fast_mkl()


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[..., in_features]` to `[..., out_features]`, as `torch.nn.functional.linear`."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not HAS_ONEDNN:
        return linear(input, weight, bias)
    inputs = input.shape[-1]
    if HAS_FAST_MKL and (inputs < FEW_INPUTS or input.numel() <= FEW_ROWS * inputs):
        return linear(input, weight, bias)
    multiply: Any = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  # torch's name
    out: torch.Tensor = multiply(input, weight, bias, "none", [], "")
    return out


class FastLinear(torch.nn.Linear):
    """Computes its product by `product`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """As `torch.nn.Linear`: `[..., in_features]` to `[..., out_features]`."""
        return product(input, self.weight, self.bias)


class FirstLinear(torch.nn.Linear):
    """The first of several layers without biases. It computes the outputs of all: `sizes`, as they are called, of which
    it leaves those of the others in `rest`, the last one first.
    """

    sizes: list[int]
    rest: list[torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """As `torch.nn.Linear`; rows of the output lie apart."""
        weights = self.weight.as_strided((sum(self.sizes), self.in_features), (self.in_features, 1))
        out, *rest = torch.split(product(input, weights), self.sizes, dim=-1)
        self.rest[:] = reversed(rest)
        return out


class NextLinear(torch.nn.Linear):
    """A layer whose output was computed by a `FirstLinear`, with the same `rest`."""

    rest: list[torch.Tensor]

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`, for the input of the first layer."""
        return self.rest.pop()


def speed_up(model: torch.nn.Module) -> None:
    """Make the linear layers of a model `FastLinear`."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = FastLinear


def merge_products(model: torch.nn.Module, starts_bytes: Mapping[str, int]) -> None:
    """Merge layers of a model that are `FastLinear`. `starts_bytes`: where each weight of a decoder layer begins."""
    for prefix, module in model.named_modules():
        for names in _MERGED:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is FastLinear and layer.bias is None for layer in layers):
                starts = [starts_bytes[f"{prefix}.{name}.weight"] for name in names]
                _merge(layers, starts)


def _merge(layers: list[Any], starts_bytes: Iterable[int]) -> None:
    """Merge layers if their weights lie one behind another."""
    sizes_bytes = [layer.weight.nbytes for layer in layers]
    if any(b - a != size for (a, b), size in zip(pairwise(starts_bytes), sizes_bytes, strict=False)):
        return
    rest: list[torch.Tensor] = []
    for layer in layers:
        layer.__class__, layer.rest = NextLinear, rest
    layers[0].__class__, layers[0].sizes = FirstLinear, [layer.out_features for layer in layers]
