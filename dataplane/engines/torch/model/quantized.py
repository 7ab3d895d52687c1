"""Weight-only quantized linear layers: weights stay packed in host and device memory, and a layer's are dequantized
while it runs. So a switch moves a half or a quarter of the bytes, and a step computes more.

Formats of published checkpoints; q are packed integers, z zero points, s scales, g(i) the group of input row i:

    awq    W[i, o] = (q - z[g(i), o]) s[g(i), o]          4 bits; eight outputs to an int32, interleaved
    gptq   W[i, o] = (q - z[g(i), o] - 1) s[g(i), o]      4 or 8 bits; 32 / bits inputs to an int32; `gptq_v2`: no - 1
    fp8    W[o, i] = q s[o // rows, i // columns]         E4M3 with a scale for each block, or one for the tensor

On several ranks each has whole groups, blocks and packed integers: its part of a tensor follows from its part of the
layer's weights. Where rows are in groups in any order, a rank of some rows may need any group, and has them all.

Activations are not quantized, whatever a checkpoint recommends: tokens may differ from those of kernels that do.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.nn.functional import linear

from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.engines.torch.model.checkpoint import DTYPES
from dataplane.engines.torch.model.split import Segment, Split
from dataplane.protocol.errors import ModelLoadError

Method = Literal["awq", "gptq", "fp8"]
_STORED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), ("I32",)),
    "weight": ("F8_E4M3",),
    **dict.fromkeys(("scales", "weight_scale", "weight_scale_inv"), ("F32", "F16", "BF16")),
}
"""The types that a layer's tensors may have."""
_INT_BITS = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of an int32, from the lowest, the eight outputs are."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What a config says of its quantized weights. `group`: rows of the input with one scale, 0: all. `is_shifted`:
    zero points are stored less one. `by_index`: rows are in groups in any order. `block`: outputs and inputs that share
    a scale, None: one scale for the tensor.
    """

    method: Method
    bits: int = 8
    group: int = 0
    is_shifted: bool = False
    by_index: bool = False
    block: tuple[int, int] | None = None


def read_quantization(folder: Path, described: Mapping[str, Any]) -> Quantization | None:
    """What `config.json` says; None: the weights are not quantized.

    Raises:
        ModelLoadError: a method, or a variant of one, that is not supported.
    """
    given = described.get("quantization_config")
    if given is None:
        return None
    where = f"{folder}/config.json: quantization_config"
    if not isinstance(given, dict):
        raise ModelLoadError(f"{where} must be an object")
    method = given.get("quant_method")
    if method == "fp8":
        return Quantization(method="fp8", block=_block(where, given.get("weight_block_size")))
    if method not in get_args(Method):
        supported = ", ".join(get_args(Method))
        raise ModelLoadError(f"{where}.quant_method {method!r} is not supported; supported are {supported}")
    allowed = (4,) if method == "awq" else (4, 8)
    bits, group = given.get("bits"), given.get("group_size")
    if not isinstance(bits, int) or bits not in allowed:
        raise ModelLoadError(f"{where}.bits is {bits!r}; {method} is supported with {', '.join(map(str, allowed))}")
    if not isinstance(group, int) or isinstance(group, bool) or group < -1:
        raise ModelLoadError(f"{where}.group_size must be a whole number, or -1 for all rows; it is {group!r}")
    if method == "awq" and str(given.get("version", "gemm")).lower() != "gemm":
        raise ModelLoadError(f"{where}.version {given['version']!r} is not supported; supported is gemm")
    return Quantization(
        method="awq" if method == "awq" else "gptq",
        bits=bits,
        group=max(group, 0),
        is_shifted=method == "gptq" and given.get("checkpoint_format", "gptq") == "gptq",
        by_index=bool(given.get("desc_act")),
    )


def _block(where: str, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    match given:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ModelLoadError(f"{where}.weight_block_size must be two whole numbers above 0; it is {given!r}")


@dataclass(frozen=True, kw_only=True)
class Side:
    """A side of a stored tensor: `size` outputs or inputs, `per` of which share an entry. `dim`: the side of the
    weights `[outputs, inputs]` with which it is divided among ranks, None: with none. `limit`: the field of
    `quantization_config` that says `per`.
    """

    size: int
    per: int = 1
    dim: int | None
    limit: str = ""

    @property
    def entries(self) -> int:
        return -(-self.size // self.per)

    def divided(self, split: Split) -> tuple[Segment, ...]:
        """Segments of entries, where the weights are divided as `split` says.

        Raises:
            ValueError: says which entries a rank would have a part of.
        """
        for segment in split.segments:
            if segment.share % self.per:
                raise ValueError(f"{segment.share} {('outputs', 'inputs')[split.dim]} are no multiple of {self.per}")
        return tuple(replace(segment, size=-(-segment.size // self.per)) for segment in split.segments)


class QuantizedLinear(torch.nn.Module, ABC):
    """Computes as `torch.nn.Linear` with dequantized weights. Its Parameters are named as checkpoints name them.
    `is_partial`: its output is a rank's part of a sum, to which the bias is added later.
    """

    is_partial = False

    def __init__(
        self,
        like: torch.nn.Linear,
        quantization: Quantization,
        types: Mapping[str, torch.dtype],
        split: Split | None = None,
    ) -> None:
        """`types`: of its Parameters, by name; `split`: how the weights are divided among ranks, of which `like` has
        the part of one.
        """
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.inputs_of_all_ranks = split.size if split is not None and split.dim == 1 else like.in_features
        self.quantization = quantization
        for name, sides in self.sides().items():
            empty = torch.empty([side.entries for side in sides], dtype=types[name], device="meta")
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
        self.bias: torch.nn.Parameter | None = like.bias

    @abstractmethod
    def sides(self) -> dict[str, tuple[Side, ...]]:
        """The Parameters beside the bias, and their sides."""

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[out_features, in_features]`. Integers and zero points are exact in any dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """As `torch.nn.Linear`: `[..., in_features]` to `[..., out_features]`."""
        return linear(input, self.dense(input.dtype), None if self.is_partial else self.bias)

    def _outputs(self, per: int = 1, limit: str = "") -> Side:
        return Side(size=self.out_features, per=per, dim=0, limit=limit)

    def _inputs(self, per: int = 1, limit: str = "") -> Side:
        return Side(size=self.in_features, per=per, dim=1, limit=limit)

    def _packed(self, side: Callable[[int, str], Side]) -> Side:
        """A side whose integers are packed into int32."""
        bits = self.quantization.bits
        return side(_INT_BITS // bits, f"bits={bits}")


class GroupedLinear(QuantizedLinear):
    """With a zero point and a scale for each output of a group of inputs."""

    @property
    def _group(self) -> int:
        return self.quantization.group or self.in_features

    @property
    def _groups(self) -> Side:
        if not self.quantization.group:
            return Side(size=1, dim=None)
        limit = f"group_size={self._group}"
        if self.quantization.by_index:
            return Side(size=self.inputs_of_all_ranks, per=self._group, dim=None, limit=limit)
        return self._inputs(self._group, limit)

    def _scaled(self, integers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """`(q - z) s`, in place: `integers` `[in_features, out_features]`, `zeros` `[groups, out_features]`."""
        scales = self.get_parameter("scales").to(integers.dtype)
        whole = self.in_features // self._group
        grouped = integers[: whole * self._group].view(whole, self._group, self.out_features)
        grouped.sub_(zeros[:whole, None]).mul_(scales[:whole, None])
        integers[whole * self._group :].sub_(zeros[whole:]).mul_(scales[whole:])
        return integers


class AwqLinear(GroupedLinear):
    """AutoAWQ's `gemm` version."""

    def sides(self) -> dict[str, tuple[Side, ...]]:
        packed = self._packed(self._outputs)
        return {
            "qweight": (self._inputs(), packed),
            "qzeros": (self._groups, packed),
            "scales": (self._groups, self._outputs()),
        }

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        integers, zeros = (self._unpacked(name).to(dtype) for name in ("qweight", "qzeros"))
        return self._scaled(integers, zeros).t()

    def _unpacked(self, name: str) -> torch.Tensor:
        """`[rows, out_features / 8]` int32 to `[rows, out_features]` bytes."""
        places = _integers(self.get_parameter(name), 4)
        return torch.stack([places[..., place] for place in _AWQ_PLACES], dim=-1).flatten(1)


class GptqLinear(GroupedLinear):
    """AutoGPTQ's and GPTQModel's format."""

    def sides(self) -> dict[str, tuple[Side, ...]]:
        return {
            "qweight": (self._packed(self._inputs), self._outputs()),
            "qzeros": (self._groups, self._packed(self._outputs)),
            "scales": (self._groups, self._outputs()),
            "g_idx": (self._inputs(),),
        }

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        bits = self.quantization.bits
        integers = _integers(self.get_parameter("qweight"), bits).transpose(1, 2).to(dtype).flatten(0, 1)
        integers = integers[: self.in_features]
        zeros = _integers(self.get_parameter("qzeros"), bits).flatten(1).to(dtype)
        if self.quantization.is_shifted:
            zeros = zeros + 1
        if not self.quantization.by_index:
            return self._scaled(integers, zeros).t()
        group = self.get_parameter("g_idx")
        return integers.sub_(zeros[group]).mul_(self.get_parameter("scales").to(dtype)[group]).t()


class Fp8Linear(QuantizedLinear):
    """E4M3 weights with scales of blocks, as DeepSeek and Qwen publish them, or with one scale."""

    def sides(self) -> dict[str, tuple[Side, ...]]:
        weight, block = (self._outputs(), self._inputs()), self.quantization.block
        if block is None:
            return {"weight": weight, "weight_scale": ()}
        limit = f"weight_block_size={list(block)}"
        return {"weight": weight, "weight_scale_inv": (self._outputs(block[0], limit), self._inputs(block[1], limit))}

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        weight, block = self.get_parameter("weight").to(dtype), self.quantization.block
        if block is None:
            return weight.mul_(self.get_parameter("weight_scale").to(dtype))
        rows, columns = block
        scales = self.get_parameter("weight_scale_inv").to(dtype).repeat_interleave(columns, dim=1)
        for number, row in enumerate(scales[:, : self.in_features]):
            weight[number * rows : (number + 1) * rows].mul_(row)
        return weight


_LAYERS: Mapping[Method, type[QuantizedLinear]] = {"awq": AwqLinear, "gptq": GptqLinear, "fp8": Fp8Linear}


def _integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """`[rows, columns]` int32 to `[rows, columns, 32 / bits]` bytes, from the lowest bits on. Bytes are a quarter of
    what shifted int32 would read and write.
    """
    in_bytes = packed.contiguous().view(torch.uint8).view(*packed.shape, _INT_BITS // 8)
    return in_bytes if bits == 8 else torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(2)


def quantize(
    folder: Path,
    model: torch.nn.Module,
    quantization: Quantization,
    stored: Mapping[str, StoredTensor],
    splits: Mapping[str, Split],
) -> dict[str, Split]:
    """Replace the linear layers whose weights the checkpoint holds quantized. The others, often the output embedding,
    stay as they are. `splits`: how weights are divided among ranks, by name. Returns those of the tensors that hold
    them instead.

    Raises:
        ModelLoadError: a layer cannot be divided as its format demands, has tensors of a type that is not supported,
            or is no linear layer.
    """
    made: dict[str, Split] = {}
    layer, left = _LAYERS[quantization.method], _quantized(quantization, stored)
    for prefix, module in list(model.named_modules()):
        if prefix in left and type(module) is torch.nn.Linear:
            left.remove(prefix)
            split = splits.get(f"{prefix}.weight")
            outputs = split.size if split is not None and split.dim == 0 else module.out_features
            _check_outputs(folder, prefix, outputs, quantization)
            parent, _, name = prefix.rpartition(".")
            replacement = layer(module, quantization, _types(prefix, stored), split)
            if split is not None:
                made |= _tensor_splits(folder, prefix, replacement, split)
            model.get_submodule(parent).register_module(name, replacement)
    if left:
        first = min(left)
        raise ModelLoadError(
            f"{folder}: {first} is quantized, which is supported of linear layers only, not of experts"
        )
    return made


def _tensor_splits(folder: Path, prefix: str, layer: QuantizedLinear, split: Split) -> dict[str, Split]:
    """How a layer's tensors are divided, by name, where its weights are divided as `split` says."""
    made = {}
    for name, sides in layer.sides().items():
        for number, side in enumerate(sides):
            if side.dim == split.dim:
                try:
                    made[f"{prefix}.{name}"] = replace(split, dim=number, segments=side.divided(split))
                except ValueError as error:
                    raise ModelLoadError(
                        f"{folder}: {prefix} cannot be divided among {split.ranks} GPUs: the {error}, which"
                        f" quantization_config.{side.limit} keeps together"
                    ) from error
    return made


def _quantized(quantization: Quantization, stored: Mapping[str, StoredTensor]) -> set[str]:
    """The names of the layers whose weights are stored quantized."""
    if quantization.method == "fp8":
        end = ".weight"
        return {name.removesuffix(end) for name, one in stored.items() if name.endswith(end) and one.dtype == "F8_E4M3"}
    return {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}


def _check_outputs(folder: Path, prefix: str, outputs: int, quantization: Quantization) -> None:
    """`outputs`: of all ranks."""
    per = _INT_BITS // quantization.bits
    if quantization.method != "fp8" and outputs % per:
        sides = f"{outputs} outputs are no multiple of {per}"
        raise ModelLoadError(f"{folder}: {prefix} cannot be quantized in {quantization.bits} bits: its {sides}")


def _types(prefix: str, stored: Mapping[str, StoredTensor]) -> Mapping[str, torch.dtype]:
    """Of a layer's tensors, as they are stored. One that is missing is reported by whoever reads them."""
    types = defaultdict(lambda: torch.float32)
    for name, allowed in _STORED.items():
        found = stored.get(f"{prefix}.{name}")
        if found is not None and found.dtype not in allowed:
            supported = " or ".join(allowed)
            raise ModelLoadError(f"{found.file}: {found.name} has dtype {found.dtype}; supported is {supported}")
        if found is not None:
            types[name] = DTYPES[found.dtype]
    return types
