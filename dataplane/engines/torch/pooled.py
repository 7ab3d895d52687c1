"""A model of the pool as the engine keeps it: its weights, its sequences with KV, and what its steps cost."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dataplane.engines.preemption import Place
from dataplane.engines.torch.host_models import HostModel
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.engines.torch.skeleton import Geometry
from dataplane.memory.kv_cache import KvShape
from dataplane.messages import ModelSpec
from dataplane.turns.costs import CostEstimate, LatencyModel

_GUESSES = {"cpu": (1e10, 2e10), "cuda": (2e12, 2e14)}
"""Bytes of weights read and floating-point operations done per second, until steps were timed."""


@dataclass(eq=False, kw_only=True)
class Pooled:
    """One model. `instances`: those of the control plane that share it here. `sequences`: those that have begun."""

    model: HostModel
    shape: KvShape
    estimate: CostEstimate
    context_tokens: int
    instances: set[str] = field(default_factory=set)
    sequences: list[TokenSequence] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    def decoding(self) -> list[TokenSequence]:
        """Sequences past their prefill, in the order of service."""
        return sorted((s for s in self.sequences if s.cached and s.pending == 1), key=lambda s: s.key)


def kv_shape(geometry: Geometry, block_tokens: int, dtype: torch.dtype) -> KvShape:
    """The shape of a model's KV blocks."""
    return KvShape(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        block_tokens=block_tokens,
        itemsize=dtype.itemsize,
    )


def make_pooled(host: HostModel, spec: ModelSpec, block_tokens: int, device: torch.device) -> Pooled:
    """A model that is in no arena yet and has no requests."""
    geometry, dtype = host.skeleton.geometry, host.skeleton.dtype
    return Pooled(
        model=host,
        shape=kv_shape(geometry, block_tokens, dtype),
        estimate=first_estimate(host.skeleton.size_bytes, dtype, device),
        context_tokens=min(spec.context_tokens, geometry.context_tokens),
    )


def first_estimate(weights_bytes: int, dtype: torch.dtype, device: torch.device) -> CostEstimate:
    """What steps cost before any was timed: weights are read once a step, and two operations done a parameter."""
    bytes_per_s, operations_per_s = _GUESSES.get(device.type, _GUESSES["cpu"])
    per_token_s = 2 * weights_bytes / dtype.itemsize / operations_per_s
    base_s = 1e-3 + weights_bytes / bytes_per_s
    latency = LatencyModel(
        prefill_base_s=base_s,
        prefill_per_token_s=per_token_s,
        prefill_per_token2_s=0.0,
        decode_base_s=base_s,
        decode_per_context_token_s=0.0,
        decode_per_sequence_s=per_token_s,
    )
    return CostEstimate(latency=latency)


def half_prefilled(models: Iterable[Pooled]) -> list[TokenSequence]:
    """Sequences in the midst of their prefill, which holds KV for all of their prompt."""
    return [s for pooled in models for s in pooled.sequences if s.kv.place is Place.HERE and s.pending > 1]


def sequences_here(models: Iterable[Pooled]) -> list[TokenSequence]:
    """Sequences past their prefill whose KV is in the arena and still: those that can be asked to leave."""
    return [s for pooled in models for s in pooled.sequences if s.kv.place is Place.HERE and s.pending == 1]
