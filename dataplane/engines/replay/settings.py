"""The replay engine's settings."""

from dataclasses import dataclass, field

from dataplane.engines.core.kv import KvEvents
from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.scheduling.profile import GpuProfile
from dataplane.scheduling.schedule import TurnSettings


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What a slot gives its engine.

    `weights_bytes` is the memory for weights on the slot, `kv_bytes` that for KV, `host_kv_bytes` the host memory for
    preempted and transferred KV. A step decodes at most `batch_max` sequences and prefills at most
    `prefill_tokens_per_step_max` tokens. `prefetch` loads the next model early; on a `prefill_only` slot a request
    leaves after its first token, to be decoded by another slot, and before its KV is transferred unless `kv_events` is
    "off". `kv_pressure`: how KV pressure is handled; `remap`:
    which of the `layers` equal layers of each model, which contain all its weights, are offloaded then.

    LoRA adapters take memory of their own, `adapters_bytes` at most. `adapter_steps`: by how much steps take longer
    with so many adapters in them, as (adapters, factor) in rising order, on straight lines between; without any,
    adapters take no time.

    `speed` divides every time. Token ids are below `vocabulary_size`. `mean_tokens`: answers end by themselves after
    about so many tokens (geometrically distributed); None lets each run to its `max_tokens`. `prefix_cache`: prompts
    that begin alike are computed once.
    """

    profile: GpuProfile
    weights_bytes: int
    kv_bytes: int
    host_kv_bytes: int = 2**40
    batch_max: int = 64
    prefill_tokens_per_step_max: int = 2048
    prefetch: bool = True
    prefill_only: bool = False
    kv_events: KvEvents = "host"
    kv_pressure: KvPressure = "swap"
    remap: RemapSettings = field(default_factory=RemapSettings)
    layers: int = 32
    adapters_bytes: int = 2**28
    adapter_steps: tuple[tuple[int, float], ...] = ()
    speed: float = 1.0
    vocabulary_size: int = len(WORDS)
    mean_tokens: int | None = None
    prefix_cache: bool = False
    turns: TurnSettings = field(default_factory=TurnSettings)

    @property
    def request_kv_bytes(self) -> int:
        """KV that one request alone may have: in the memory of the slot and, if it is to be exported, of the host."""
        return min(self.kv_bytes, self.host_kv_bytes) if self.prefill_only else self.kv_bytes

    def adapters_factor(self, adapters: int) -> float:
        """By how much a step with so many different adapters takes longer; as the last one where there are more."""
        before, factor = 0, 1.0
        for count, there in self.adapter_steps:
            if adapters < count:
                return factor + (there - factor) * (adapters - before) / (count - before)
            before, factor = count, there
        return factor if adapters else 1.0
