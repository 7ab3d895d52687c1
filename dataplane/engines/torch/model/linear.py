"""Linear layers by oneDNN, on a CPU in float32.

torch itself multiplies float32 by MKL there. On one thread of a CPU with AVX-512, oneDNN takes a half to nine tenths of
its time, for one row as for hundreds, and reads the weights where they lie.
"""

from typing import Any

import torch
from torch.nn.functional import linear


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[..., in_features]` to `[..., out_features]`, as `torch.nn.functional.linear`."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return linear(input, weight, bias)
    multiply: Any = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  # torch's name
    out: torch.Tensor = multiply(input, weight, bias, "none", [], "")
    return out


class FastLinear(torch.nn.Linear):
    """Computes its product by `product`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """As `torch.nn.Linear`: `[..., in_features]` to `[..., out_features]`."""
        return product(input, self.weight, self.bias)


def speed_up(model: torch.nn.Module) -> None:
    """Make the linear layers of a model `FastLinear`."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = FastLinear
