"""Tensor parallelism in a model's modules: what a rank computes in part is summed or gathered over all ranks.

A decoder layer sums twice, after attention and after the MLP or its experts, and each rank continues from the same
hidden states. What a LoRA adapter adds to a part of a sum, it adds before the parts are summed. The embedding is split
by tokens, as is the output embedding, which may be the same weight: a rank looks up the tokens that it has, and the sum
over the ranks is exact, since all but one of them add zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from dataplane.engines.torch.model.linear import product
from dataplane.engines.torch.model.quantized.layers import ExpertStack, QuantizedLinear
from dataplane.engines.torch.model.split import Split


class Collectives(Protocol):
    """Operations that all ranks of a group call in the same order. Every rank gets the same bits."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors. The tensor itself may be overwritten."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors `[..., n]` of all ranks as one of `[..., ranks * n]`, in the order of the ranks."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the `count` processes that run a model together."""

    index: int
    count: int
    collectives: Collectives


class Unconnected:
    """The collectives of a rank whose model is measured, and not run."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this rank has no others")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this rank has no others")


class RowParallelLinear(torch.nn.Linear):
    """A linear layer whose input columns are divided among the ranks. Its output is a part of the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """`[..., in_features of this rank]` to `[..., out_features]`, without the bias."""
        return product(input, self.weight)


def _sum_outputs(collectives: Collectives, layer: Any, _: Any, out: torch.Tensor) -> torch.Tensor:
    """The hook of a row parallel layer. The bias is added to the sum, once."""
    out = collectives.all_reduce(out)
    return out if layer.bias is None else out + layer.bias


class ParallelRMSNorm(torch.nn.Module):
    """A norm over all heads, which are divided among the ranks (OLMo 2)."""

    rank: Rank
    variance_epsilon: float
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., size of this rank]`. Where ranks repeat heads, each is repeated as often, so the mean is right."""
        states = hidden_states.to(torch.float32)
        mean = self.rank.collectives.all_reduce(states.pow(2).mean(-1, keepdim=True)) / self.rank.count
        states = states * torch.rsqrt(mean + self.variance_epsilon)
        return (self.weight * states).to(hidden_states.dtype)


class _Tokens:
    """The hooks of an embedding that has the tokens `[first, first + count)`."""

    def __init__(self, rank: Rank, count: int) -> None:
        self._collectives = rank.collectives
        self._first = rank.index * count
        self._count = count
        self._missing = torch.empty(0)

    def before(self, _: torch.nn.Module, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        """The rows of tokens; row 0 for those of other ranks."""
        rows = arguments[0] - self._first
        self._missing = (rows < 0) | (rows >= self._count)
        return rows.masked_fill(self._missing, 0)

    def after(self, _: torch.nn.Module, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        """The embeddings of all tokens."""
        return self._collectives.all_reduce(embedded.masked_fill(self._missing[..., None], 0))


def parallelize(model: Any, splits: Mapping[str, Split], rank: Rank, vocabulary: int) -> None:
    """Let the modules of a rank's model compute what those of the whole model do. Its logits are those of all tokens,
    `vocabulary` of them, on every rank.
    """
    collectives = rank.collectives
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        split = splits.get(f"{name}.weight")
        if f"{name}.down_proj" in splits:  # experts, which have no modules of their own
            module.register_forward_hook(lambda _, __, out: collectives.all_reduce(out))
        elif split is None or isinstance(module, ExpertStack):
            continue
        elif module is head:
            module.register_forward_hook(lambda _, __, out: collectives.all_gather(out)[..., :vocabulary])
        elif isinstance(module, torch.nn.Embedding):
            tokens = _Tokens(rank, module.num_embeddings)
            module.register_forward_pre_hook(tokens.before)
            module.register_forward_hook(tokens.after)
        elif isinstance(module, torch.nn.Linear | QuantizedLinear):
            if split.dim == 1:
                _make_partial(module)
                module.register_forward_hook(partial(_sum_outputs, collectives))
        else:
            assert name.endswith(("q_norm", "k_norm")), f"{name} is split, and nothing joins its parts"
            _become(module, ParallelRMSNorm, rank=rank)


def _make_partial(module: torch.nn.Linear | QuantizedLinear) -> None:
    """Let the output of a linear layer be a part of a sum."""
    if isinstance(module, QuantizedLinear):
        module.is_partial = True
    else:
        _become(module, RowParallelLinear)


def _become(module: Any, kind: type[torch.nn.Module], **attributes: object) -> None:
    """Let a module compute as another class does, on the same weights."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)
