"""What a model costs on a slot, and how an instance is set up."""

from dataclasses import dataclass, field
from typing import Literal

from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.schedule import TurnSettings

Batching = Literal["turns", "prefill-first"]
"""`turns`: as the live slot does. `prefill-first`: a waiting prompt always goes before the batch, as elsewhere."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model on a slot. `bytes_per_s`: how fast weights and KV move."""

    name: str
    latency: LatencyModel
    weights_bytes: int
    kv_bytes_per_token: int
    bytes_per_s: float

    @property
    def switch_s(self) -> float:
        """The transfer time of its weights."""
        return self.weights_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class InstanceSettings:
    """`batch_max`: sequences that decode together at most. A step prefills `prefill_tokens_per_step_max` at most.
    `prefill_only`: a request leaves after its first token, to be decoded elsewhere. What the prefix cache evicts from
    KV memory goes to `prefix_host_bytes` of host memory.
    """

    kv_bytes: int
    batch_max: int = 64
    prefill_tokens_per_step_max: int = 2048
    batching: Batching = "turns"
    prefill_only: bool = False
    prefix_host_bytes: int = 0
    turns: TurnSettings = field(default_factory=TurnSettings)
