"""A model of the torch engine."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.constraints.compiler import ConstraintCompiler
from dataplane.engines.core.served_models import ServedModel, recent
from dataplane.engines.torch.memory.host_models import HostModel
from dataplane.engines.torch.memory.kv import SequenceKv
from dataplane.engines.torch.model.skeleton import Geometry
from dataplane.memory.kv_cache import KvShape
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.costs import CostEstimate, LatencyModel

_GUESSES = {"cpu": (1e10, 2e10), "cuda": (2e12, 2e14)}
"""Bytes of weights read and floating-point operations per second, before steps were timed."""


@dataclass(eq=False, kw_only=True)
class TorchModel(ServedModel[SequenceKv]):
    """One model, its weights and the shape of its KV blocks. `decode_ratio`: recent mean of the time of its decode
    steps over the time by `estimate.latency`; None before the first.
    """

    weights: HostModel
    shape: KvShape
    decode_ratio: float | None = None

    @property
    def weights_bytes(self) -> int:
        return self.weights.skeleton.size_bytes

    @property
    def layers(self) -> int:
        return self.weights.skeleton.geometry.layers

    def observe_decode(self, took_s: float, context_tokens: int, batch: int) -> None:
        super().observe_decode(took_s, context_tokens, batch)
        self.decode_ratio = recent(self.decode_ratio, took_s / self.estimate.latency.decode_s(context_tokens, batch))

    def layers_compute_s(self, batch_max: int, *, decoding: bool) -> float | None:
        """Measured seconds that a step spends in the layers, by their share of the weights: a decode step of the
        present batch, or else a recent prefill step (before the first, a decode step of one sequence, which is
        shorter). None if neither is known.
        """
        skeleton = self.weights.skeleton
        share = sum(shard.size_bytes for shard in skeleton.shards[1 : self.layers + 1]) / skeleton.size_bytes
        if not decoding and self.prefill_s:
            return share * self.prefill_s
        if not self.decode_ratio:
            return None
        batch = self.decoding[:batch_max] if decoding else []
        context_tokens = sum(sequence.cached for sequence in batch)
        return share * self.decode_ratio * self.estimate.latency.decode_s(context_tokens, max(len(batch), 1))

    def new_kv(self, adapter: str) -> SequenceKv:
        layout = self.weights.key
        if adapter:
            layout = f"{layout} with {self.weights.skeleton.adapters.key(adapter)}"
        return SequenceKv(shape=self.shape, model=self.name, adapter=adapter, layout=layout)


def kv_shape(geometry: Geometry, block_tokens: int, dtype: torch.dtype) -> KvShape:
    """The shape of a model's KV blocks."""
    return KvShape(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        block_tokens=block_tokens,
        itemsize=dtype.itemsize,
    )


def make_model(host: HostModel, spec: ModelSpec, block_tokens: int, device: torch.device) -> TorchModel:
    """A model that is not loaded yet and has no requests."""
    geometry, dtype = host.skeleton.geometry, host.skeleton.dtype
    return TorchModel(
        name=host.name,
        context_tokens=min(spec.context_tokens, geometry.context_tokens),
        vocabulary=geometry.vocabulary,
        task=spec.task,
        constraints=ConstraintCompiler(Path(spec.path), size=geometry.vocabulary, eos_ids=host.skeleton.eos_ids),
        estimate=first_estimate(host.skeleton.size_bytes, dtype, device),
        weights=host,
        shape=kv_shape(geometry, block_tokens, dtype),
    )


def first_estimate(weights_bytes: int, dtype: torch.dtype, device: torch.device) -> CostEstimate:
    """The cost of untimed steps: each reads all weights, and does two operations per parameter and token."""
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
