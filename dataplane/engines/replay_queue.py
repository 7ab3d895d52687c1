"""The requests of one replayed instance: who runs, who waits, who must give its KV back."""

from dataclasses import dataclass, field

from dataplane.engine import EngineRequest, InstanceStats
from dataplane.messages import ModelSpec
from dataplane.turns.costs import LatencyModel


@dataclass(kw_only=True)
class Sequence:
    """A request on its way. `prefilled`: its KV is there; only then does it count as used."""

    request: EngineRequest
    key: bytes
    arrived_s: float
    generated: int
    prefilled: bool = False

    @property
    def tokens(self) -> int:
        """Prompt and what was generated so far."""
        return len(self.request.prompt) + self.generated

    @property
    def remaining_tokens(self) -> int:
        """Tokens to prefill (again) and tokens still to make."""
        return (0 if self.prefilled else self.tokens) + self.request.max_tokens - self.generated


@dataclass(kw_only=True)
class Instance:
    """One instance: its queues and its share of KV memory."""

    instance_id: str
    model: ModelSpec
    latency: LatencyModel
    kv_capacity_bytes: int
    gpus: int = 1
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the admitted requests hold, or are about to hold, KV for."""
        return sum(sequence.tokens for sequence in self.running)

    @property
    def kv_tokens_max(self) -> int:
        """Tokens the KV cache has room for."""
        return self.kv_capacity_bytes // self.model.kv_bytes_per_token

    def sequences(self) -> list[Sequence]:
        """All requests, running first."""
        return self.running + self.waiting

    def admit(self, batch_max: int) -> None:
        """Move waiting requests in, in order, while the batch and the KV cache have room for one more step of all."""
        while self.waiting and len(self.running) < batch_max:
            needed = self.kv_tokens + self.waiting[0].tokens + len(self.running) + 1
            if needed > self.kv_tokens_max:
                return
            self.running.append(self.waiting.pop(0))

    def preempt(self) -> None:
        """Send the youngest requests back until the rest can grow by a token each. One alone always fits."""
        while self.kv_tokens + len(self.running) > self.kv_tokens_max and len(self.running) > 1:
            sequence = self.running.pop()
            sequence.prefilled = False
            self.waiting.insert(0, sequence)

    def stats(self) -> InstanceStats:
        """The load right now; only prefilled requests use KV."""
        prefilled = sum(sequence.tokens for sequence in self.running if sequence.prefilled)
        return InstanceStats(
            instance_id=self.instance_id,
            kv_used_bytes=prefilled * self.model.kv_bytes_per_token,
            kv_capacity_bytes=self.kv_capacity_bytes,
            remaining_tokens=sum(sequence.remaining_tokens for sequence in self.sequences()),
            running=len(self.running),
            waiting=len(self.waiting),
        )
