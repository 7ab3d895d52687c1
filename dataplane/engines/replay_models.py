"""The models of a replayed slot, and what they say."""

from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TypeVar
from weakref import WeakKeyDictionary

from dataplane.engine import EngineRequest
from dataplane.engines.replay_memory import SequenceKv, Weights
from dataplane.engines.sequences import TokenSequence
from dataplane.engines.served_models import ServedModel
from dataplane.messages import ModelSpec
from dataplane.profile import GpuProfile
from dataplane.turns.costs import CostEstimate, LatencyModel

ReplaySequence = TokenSequence[SequenceKv]


@dataclass(eq=False, kw_only=True)
class ReplayModel(ServedModel[SequenceKv]):
    """One model. `bytes_per_s`: how fast its weights and KV move."""

    weights: Weights
    kv_bytes_per_token: int
    bytes_per_s: float

    @property
    def weights_bytes(self) -> int:
        """The size of its weights."""
        return self.weights.size_bytes

    @property
    def latency(self) -> LatencyModel:
        """How long steps take."""
        return self.estimate.latency

    def new_kv(self) -> SequenceKv:
        """The KV of a sequence that has none yet."""
        return SequenceKv(bytes_per_token=self.kv_bytes_per_token, bytes_per_s=self.bytes_per_s)


ReplayModelT = TypeVar("ReplayModelT", bound=ReplayModel)


def replayed(kind: type[ReplayModelT], spec: ModelSpec, profile: GpuProfile, gpus: int, speed: float) -> ReplayModelT:
    """A model as it runs on so many GPUs of a type, every time divided by `speed`."""
    latency = profile.nearest_model(spec.weights_bytes, gpus).latency
    faster = LatencyModel(**{name: value / speed for name, value in asdict(latency).items()})
    bytes_per_s = profile.pcie_bytes_per_s * profile.transfer_efficiency * gpus * speed
    return kind(
        name=spec.name,
        context_tokens=spec.context_tokens,
        vocabulary=None,
        estimate=CostEstimate(latency=faster),
        weights=Weights(model=spec.name, size_bytes=spec.weights_bytes, switch_s=spec.weights_bytes / bytes_per_s),
        kv_bytes_per_token=spec.kv_bytes_per_token,
        bytes_per_s=bytes_per_s,
    )


class Answers:
    """What the models say: token ids below `vocabulary_size`. `mean_tokens`: how long an answer is on average until it
    ends by itself; None if none does.
    """

    def __init__(self, vocabulary_size: int, mean_tokens: int | None) -> None:
        self._vocabulary_size = vocabulary_size
        self._mean_tokens = mean_tokens
        self._keys: WeakKeyDictionary[ReplaySequence, bytes] = WeakKeyDictionary()

    def next_token(self, sequence: ReplaySequence) -> int | None:
        """The next token, None for the end. It hangs on the sampling key and the position alone."""
        key = self._keys.get(sequence)
        if key is None:
            key = self._keys[sequence] = _sampling_key(sequence.model, sequence.request)
        drawn = blake2b(len(sequence.tokens).to_bytes(8, "little"), key=key, digest_size=16).digest()
        chance = int.from_bytes(drawn[:8], "little") / 2**64
        if self._mean_tokens is not None and not sequence.request.ignore_eos and chance < 1 / self._mean_tokens:
            return None
        return int.from_bytes(drawn[8:], "little") % self._vocabulary_size


def _sampling_key(model: str, request: EngineRequest) -> bytes:
    """What the tokens of a request hang on besides their position. Greedy answers do not hang on the seed."""
    seed = request.seed if request.temperature > 0 else 0
    return blake2b(repr((model, request.prompt, seed)).encode(), digest_size=32).digest()
