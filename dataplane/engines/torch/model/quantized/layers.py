"""Layers whose weights stay packed in host and device memory, so that a switch moves a half or a quarter of the bytes.

Activations are not quantized, whatever a checkpoint recommends: tokens may differ from those of kernels that do.
"""

from collections.abc import Mapping
from typing import cast

import torch

from dataplane.engines.torch.model.quantized.formats import Format, StoredFormat, Tensors
from dataplane.engines.torch.model.quantized.int4_cpu import Int4CpuFormat

FEW_PAIRS = 256
"""Up to so many tokens times experts each row is multiplied by itself on a GPU, without waiting for its expert."""


class PackedWeights(torch.nn.Module):
    """The Parameters of packed weights, of one layer or of all `experts` of one."""

    def __init__(self, form: Format, types: Mapping[str, torch.dtype], experts: int | None = None) -> None:
        """`types`: of the tensors of the checkpoint, by name."""
        super().__init__()
        self.form = form
        self._types = types
        self._before = () if experts is None else (experts,)
        for name, kept in form.kept(types).items():
            empty = torch.empty((*self._before, *kept.shape), dtype=kept.dtype, device="meta")
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Of its tensors in memory."""
        return tuple(self.form.kept(self._types))

    @property
    def is_repacked(self) -> bool:
        """Whether its tensors lie in memory otherwise than in the checkpoint."""
        return isinstance(self.form, Int4CpuFormat)

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, empty on `meta`."""
        return {
            name: torch.empty(
                (*self._before, *(side.entries for side in sides)), dtype=self._types[name], device="meta"
            )
            for name, sides in self.form.sides().items()
        }

    def repack(self, stored: Tensors, kept: Tensors) -> None:
        """Fill the tensors in memory, `kept`, from those of the checkpoint."""
        assert isinstance(self.form, Int4CpuFormat), "tensors of other formats are read to where they lie"
        if not self._before:
            self.form.repack(stored, kept)
            return
        for expert in range(self._before[0]):
            self.form.repack(_of(stored, expert), _of(kept, expert))


class QuantizedLinear(PackedWeights):
    """Computes as `torch.nn.Linear` with dequantized weights. `is_partial`: its output is a rank's part of a sum, to
    which the bias is added later.
    """

    is_partial = False

    def __init__(self, form: Format, types: Mapping[str, torch.dtype], bias: torch.nn.Parameter | None) -> None:
        super().__init__(form, types)
        self.in_features, self.out_features = form.shape.inputs, form.shape.outputs
        self.bias: torch.nn.Parameter | None = bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """As `torch.nn.Linear`: `[..., in_features]` to `[..., out_features]`."""
        out = self.form.product(cast("Tensors", self._parameters), input.reshape(-1, self.in_features))
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None or self.is_partial else out.add_(self.bias)


class ExpertStack(PackedWeights):
    """One of the linear layers of all experts of a layer."""

    def product(self, expert: int, input: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` to `[rows, outputs]` by one expert's weights."""
        return self.form.product(_of(cast("Tensors", self._parameters), expert), input)

    def product_of_each(self, experts: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` to `[rows, outputs]` by the weights of each row's expert, on a GPU."""
        assert isinstance(self.form, StoredFormat), "on a GPU tensors lie as in the checkpoint"
        return self.form.multiply_packed(cast("Tensors", self._parameters), input, experts)


class QuantizedExperts(torch.nn.Module):
    """Computes as transformers' experts with dequantized weights."""

    def __init__(self, stacks: Mapping[str, ExpertStack], act_fn: torch.nn.Module) -> None:
        """`stacks`: `gate_proj`, `up_proj` and `down_proj`."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (stacks[name] for name in ("gate_proj", "up_proj", "down_proj"))
        self.act_fn = act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of what the experts of each token make of it: `[tokens, hidden]`, with `[tokens, k]` experts
        and weights.
        """
        tokens, k = top_k_index.shape
        experts = top_k_index.flatten()
        if hidden_states.is_cuda and tokens * k <= FEW_PAIRS:
            made = self._of_few(hidden_states.repeat_interleave(k, dim=0), experts)
        else:
            made = self._expert_by_expert(hidden_states, experts, k)
        return (made.view(tokens, k, -1) * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    def _of_few(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What each row's own expert makes of it."""
        inner = self.act_fn(self.gate_proj.product_of_each(experts, rows)) * self.up_proj.product_of_each(experts, rows)
        return self.down_proj.product_of_each(experts, inner)

    def _expert_by_expert(self, hidden_states: torch.Tensor, experts: torch.Tensor, k: int) -> torch.Tensor:
        """The same for `k` experts of each token. The host waits for their numbers."""
        order = experts.argsort(stable=True)
        counts = experts.bincount().tolist()
        made = hidden_states.new_empty(len(experts), hidden_states.shape[1])
        for expert, pairs in enumerate(torch.split(order, counts)):
            if len(pairs):
                rows = hidden_states[pairs // k]
                inner = self.act_fn(self.gate_proj.product(expert, rows)) * self.up_proj.product(expert, rows)
                made[pairs] = self.down_proj.product(expert, inner)
        return made


def _of(tensors: Tensors, expert: int) -> Tensors:
    return {name: stacked[expert] for name, stacked in tensors.items()}
