"""Root mean square norms as one kernel each, on a GPU."""

import torch
from torch.nn.functional import rms_norm


class FusedRMSNorm(torch.nn.Module):
    """As transformers' norm of Llama and those that have the same, which are six kernels. In bfloat16 the result is
    rounded once, where theirs is before it is multiplied by the weight, too.
    """

    variance_epsilon: float
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., size]` to `[..., size]`."""
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def fuse_norms(model: torch.nn.Module) -> None:
    """Let the norms of a model be computed by one kernel. Gemma's add one to the weight, and have another attribute."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = FusedRMSNorm
