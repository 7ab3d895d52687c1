"""The models and requests of a replayed slot."""

from bisect import insort
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

from dataplane.engine import EngineOutput, EngineRequest
from dataplane.engines.replay_memory import SequenceKv, Weights
from dataplane.messages import ModelSpec
from dataplane.profile import GpuProfile
from dataplane.turns.costs import CostEstimate, LatencyModel
from dataplane.turns.decode import BatchFacts
from dataplane.turns.prefill import PrefillRequest
from dataplane.turns.tiers import TIER_TARGETS


@dataclass(eq=False, kw_only=True)
class ReplaySequence:
    """A request on its way. `order`: its place in the order of arrival. Of its `tokens`, the first `cached` have KV:
    all but the last once it decodes.
    """

    request: EngineRequest
    model: str
    order: int
    added_s: float
    sampling_key: bytes
    kv: SequenceKv
    generated: int
    cached: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The order of service: by tier, then first come, first served."""
        return TIER_TARGETS[self.request.tier].rank, self.order

    @property
    def tokens(self) -> int:
        """Prompt and what was generated so far, here and elsewhere."""
        return len(self.request.prompt) + self.generated

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens not yet prefilled + tokens still to make."""
        return max(0, len(self.request.prompt) - self.cached) + self.request.max_tokens - self.generated

    @property
    def deadline_s(self) -> float:
        """When its next token is due. A request that was begun elsewhere owes one at once, after a TBT."""
        target = TIER_TARGETS[self.request.tier]
        made = self.generated - len(self.request.generated)
        return self.added_s + (target.tbt_s if self.request.generated else target.ttft_s) + made * target.tbt_s

    def to_prefill(self) -> PrefillRequest:
        """What the prefill queue must know of it."""
        return PrefillRequest(
            request_id=self.request.request_id,
            model=self.model,
            tokens=self.tokens - self.cached,
            tier=self.request.tier,
            arrived_s=self.added_s,
        )

    def make_token(self, vocabulary_size: int, mean_tokens: int | None) -> EngineOutput:
        """The next token, or the end. It hangs on the sampling key and the position alone."""
        request = self.request
        drawn = blake2b(self.tokens.to_bytes(8, "little"), key=self.sampling_key, digest_size=16).digest()
        chance = int.from_bytes(drawn[:8], "little") / 2**64
        if mean_tokens is not None and not request.ignore_eos and chance < 1 / mean_tokens:
            return EngineOutput(request_id=request.request_id, finish_reason="stop")
        self.generated += 1
        return EngineOutput(
            request_id=request.request_id,
            token_ids=(int.from_bytes(drawn[8:], "little") % vocabulary_size,),
            finish_reason="length" if self.generated >= request.max_tokens else None,
        )


def sampling_key(model: str, request: EngineRequest) -> bytes:
    """What the tokens of a request hang on besides their position. Greedy answers do not hang on the seed."""
    seed = request.seed if request.temperature > 0 else 0
    return blake2b(repr((model, request.prompt, seed)).encode(), digest_size=32).digest()


@dataclass(eq=False, kw_only=True)
class ReplayModel:
    """A model of the slot, and the instances that share it. `decoding`: the requests past their prefill, in the order
    of service. `bytes_per_s`: how fast its weights and KV move.
    """

    spec: ModelSpec
    weights: Weights
    estimate: CostEstimate
    bytes_per_s: float
    instances: set[str] = field(default_factory=set)
    decoding: list[ReplaySequence] = field(default_factory=list)

    @property
    def latency(self) -> LatencyModel:
        """How long steps take."""
        return self.estimate.latency

    def begin_decoding(self, sequence: ReplaySequence) -> None:
        """Take a request in whose prefill is over."""
        insort(self.decoding, sequence, key=lambda s: s.key)

    def end_decoding(self, sequence: ReplaySequence) -> None:
        """Take a request out, if it is there."""
        if sequence in self.decoding:
            self.decoding.remove(sequence)

    def batch_facts(self, *, now_s: float, switch_s: float, prefetched: bool, batch_max: int) -> BatchFacts:
        """What the decode turns must know, when something decodes."""
        batch = self.decoding[:batch_max]
        return BatchFacts(
            model=self.spec.name,
            sequences=len(batch),
            step_s=self.estimate.decode_s(sum(sequence.cached for sequence in batch), len(batch)),
            tbt_s=min(TIER_TARGETS[sequence.request.tier].tbt_s for sequence in batch),
            switch_s=switch_s,
            prefetched=prefetched,
            slack_s=min(sequence.deadline_s for sequence in batch) - now_s,
        )


def replayed(spec: ModelSpec, profile: GpuProfile, gpus: int, speed: float) -> ReplayModel:
    """A model as it runs on so many GPUs of a type, every time divided by `speed`."""
    latency = profile.nearest_model(spec.weights_bytes, gpus).latency
    faster = LatencyModel(**{name: value / speed for name, value in asdict(latency).items()})
    bytes_per_s = profile.pcie_bytes_per_s * profile.transfer_efficiency * gpus * speed
    return ReplayModel(
        spec=spec,
        weights=Weights(model=spec.name, size_bytes=spec.weights_bytes, switch_s=spec.weights_bytes / bytes_per_s),
        estimate=CostEstimate(latency=faster),
        bytes_per_s=bytes_per_s,
    )
