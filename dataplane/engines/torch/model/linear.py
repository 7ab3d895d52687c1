"""Linear layers that are fast on a CPU for the few rows of a decode step."""

import torch

FEW_ROWS = range(8, 65)
"""For so many rows `weight @ x^T` takes half to nine tenths of the time of `x @ weight^T`, in float32 on one thread of
a CPU with AVX-512; for fewer or more it takes as long, or longer.
"""


def is_quick(weight: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether `transposed_product` of the two is the faster one."""
    few_rows = input.numel() // weight.shape[1] in FEW_ROWS
    return few_rows and weight.dtype == torch.float32 and weight.device.type == "cpu"


def transposed_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[..., in_features]` to `[..., out_features]`, as `torch.nn.functional.linear`."""
    rows = input.reshape(-1, weight.shape[1])
    # The next operation reads row by row: without this copy it would cost what the product saves.
    return (weight @ rows.t()).t().contiguous().view(*input.shape[:-1], weight.shape[0])


class FewRowsLinear(torch.nn.Linear):
    """Computes the transposed product where it has few rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """As `torch.nn.Linear`: `[..., in_features]` to `[..., out_features]`."""
        if not is_quick(self.weight, input):
            return super().forward(input)
        out = transposed_product(input, self.weight)
        return out if self.bias is None else out.add_(self.bias)


def speed_up(model: torch.nn.Module) -> None:
    """Make the linear layers of a model `FewRowsLinear`."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = FewRowsLinear
