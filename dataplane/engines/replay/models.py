"""The models of a replayed slot, and the tokens they make; or the embeddings and scores, which depend on the prompt
alone.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from dataplane.constraints.compiler import ConstraintCompiler
from dataplane.constraints.matcher import Matcher, allowed_from
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.interface import EngineRequest, TokenScore
from dataplane.engines.replay.kv import KvShare, SequenceKv
from dataplane.engines.replay.settings import ReplaySettings
from dataplane.engines.replay.vocabulary import REPLAY_EMBEDDING_SIZE
from dataplane.engines.replay.weights import Weights
from dataplane.protocol.messages import ModelSpec, Task
from dataplane.scheduling.costs import CostEstimate, LatencyModel

ReplaySequence = TokenSequence[SequenceKv]


@dataclass(eq=False, kw_only=True)
class ReplayModel(ServedModel[SequenceKv]):
    """One model. `bytes_per_s`: the transfer rate of its weights and KV. `share`: the KV memory it is limited to."""

    weights: Weights
    kv_bytes_per_token: int
    bytes_per_s: float
    share: KvShare | None = None

    @property
    def weights_bytes(self) -> int:
        return self.weights.size_bytes

    def compute_s(self, batch_max: int, *, decoding: bool) -> float | None:
        """Seconds that a step spends in the layers: a decode step of the present batch, or else a recent prefill step
        (before the first, a decode step of one sequence, which is shorter). None if it is 0.
        """
        if not decoding and self.prefill_s:
            return self.prefill_s
        batch = self.decoding[:batch_max] if decoding else []
        context_tokens = sum(sequence.cached for sequence in batch)
        return self.estimate.decode_s(context_tokens, max(len(batch), 1)) or None

    @property
    def latency(self) -> LatencyModel:
        return self.estimate.latency

    def new_kv(self, adapter: str) -> SequenceKv:
        return SequenceKv(
            bytes_per_token=self.kv_bytes_per_token,
            bytes_per_s=self.bytes_per_s,
            share=self.share,
            model=self.name,
            adapter=adapter,
        )


def adapters_of(sequences: Iterable[ReplaySequence]) -> int:
    """How many different adapters sequences have."""
    return len({sequence.adapter for sequence in sequences} - {""})


ReplayModelT = TypeVar("ReplayModelT", bound=ReplayModel)


def replayed(kind: type[ReplayModelT], spec: ModelSpec, settings: ReplaySettings, gpus: int) -> ReplayModelT:
    """A model as it runs on `gpus` GPUs of the profile's type, all times divided by `speed`."""
    profile = settings.profile
    latency = profile.nearest_model(spec.weights_bytes, gpus).latency
    if settings.speed != 1:
        latency = LatencyModel(**{name: value / settings.speed for name, value in asdict(latency).items()})
    bytes_per_s = profile.pcie_bytes_per_s * profile.transfer_efficiency * gpus * settings.speed
    return kind(
        name=spec.name,
        context_tokens=spec.context_tokens,
        vocabulary=None,
        estimate=CostEstimate(latency=latency),
        weights=Weights(
            model=spec.name,
            size_bytes=spec.weights_bytes,
            switch_s=spec.weights_bytes / bytes_per_s,
            layers=min(settings.layers, spec.weights_bytes),
        ),
        kv_bytes_per_token=spec.kv_bytes_per_token,
        task=spec.task,
        constraints=ConstraintCompiler(Path(spec.path)),
        bytes_per_s=bytes_per_s,
    )


class Answers:
    """Makes the tokens: ids below `vocabulary_size`. `mean_tokens`: the mean length of answers that end by themselves;
    None if none does.
    """

    def __init__(self, vocabulary_size: int, mean_tokens: int | None) -> None:
        self._vocabulary_size = vocabulary_size
        self._mean_tokens = mean_tokens
        self._keys: WeakKeyDictionary[ReplaySequence, bytes] = WeakKeyDictionary()

    def next_token(self, sequence: ReplaySequence) -> int | None:
        """The next token, None for the end. It depends on the sampling key and the position alone."""
        key = self._keys.get(sequence)
        if key is None:
            key = self._keys[sequence] = _sampling_key(sequence.answers_as, sequence.request)
        drawn = blake2b(len(sequence.tokens).to_bytes(8, "little"), key=key, digest_size=16).digest()
        chance = int.from_bytes(drawn[:8], "little") / 2**64
        if sequence.matcher is not None:
            return _constrained_token(sequence, sequence.matcher, chance, int.from_bytes(drawn[8:], "little"))
        if self._mean_tokens is not None and chance < 1 / self._mean_tokens and _may_end(sequence):
            return None
        return int.from_bytes(drawn[8:], "little") % self._vocabulary_size

    def score(self, sequence: ReplaySequence, token: int, top: int) -> TokenScore:
        """Plausible log probabilities of a token and of `top` likeliest ones, of which it is the first. They depend on
        the token and its position alone: the nth of them has the probability p * (1 - p)^(n - 1).
        """
        p = 0.5 + 0.5 * ((token * 31 + len(sequence.tokens) * 17) % 97 + 1) / 100
        logprobs = [math.log(p) + n * math.log1p(-p) for n in range(max(1, min(top, self._vocabulary_size)))]
        tokens = [(token + n) % self._vocabulary_size for n in range(min(top, self._vocabulary_size))]
        return TokenScore(logprob=logprobs[0], top=tuple(zip(tokens, logprobs, strict=False)))


def _constrained_token(sequence: ReplaySequence, matcher: Matcher, chance: float, number: int) -> int | None:
    """A token that the constraint allows: the first one from a drawn one on. Where it allows the end, every second
    answer ends.
    """
    mask = matcher.mask(sequence.tokens)
    if matcher.must_end or (matcher.may_end and chance < 0.5 and _may_end(sequence)):
        return None
    return next((token for token in allowed_from(mask, number % len(mask)) if token not in matcher.eos_ids), None)


def _may_end(sequence: ReplaySequence) -> bool:
    request = sequence.request
    return not request.ignore_eos and sequence.generated >= request.min_tokens


def pooled_values(sequence: ReplaySequence, task: Task) -> tuple[float, ...]:
    """A unit vector of `REPLAY_EMBEDDING_SIZE` numbers, or one score between 0 and 1."""
    key = blake2b(repr((sequence.answers_as, sequence.request.prompt)).encode(), digest_size=32).digest()
    drawn = (blake2b(number.to_bytes(8, "little"), key=key, digest_size=8).digest() for number in count())
    shares = (int.from_bytes(digest, "little") / 2**64 for digest in drawn)
    if task == "score":
        return (next(shares),)
    vector = [next(shares) - 0.5 for _ in range(REPLAY_EMBEDDING_SIZE)]
    length = math.hypot(*vector)
    return tuple(value / length for value in vector)


def _sampling_key(model: str, request: EngineRequest) -> bytes:
    """What the tokens of a request depend on besides their position. Greedy answers do not depend on the seed."""
    seed = request.seed if request.temperature > 0 else 0
    return blake2b(repr((model, request.prompt, seed)).encode(), digest_size=32).digest()
