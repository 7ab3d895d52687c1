"""A model of a pool's slot, and its sequences that decode in closed form.

A batched sequence makes a token in every decode step of the model: `Batch` computes what it has made. The live engine's
state of such a sequence (its tokens, its KV) is as of when it joined the batch, until it leaves; sums over the batch
are always right. To read the state of a batched sequence, dissolve the batch first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.engines.core.kv import HOST
from dataplane.engines.replay.models import ReplayModel, ReplaySequence
from dataplane.scheduling.decode import BatchFacts
from ops.simulator.kernel.answers import Answers, TrueAnswers
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import Sequence, Served
from ops.simulator.servers.batch import Batch

_ANY = 2**62


@dataclass(eq=False, kw_only=True)
class FastForwardModel(ReplayModel):
    """One model. `has_next_kv`: the batched sequences have KV for their next tokens. `answers`: of its requests."""

    answers: Answers = field(default_factory=TrueAnswers)
    batched: dict[int, ReplaySequence] = field(default_factory=dict)
    """By `order`."""
    unbatched: list[ReplaySequence] = field(default_factory=list)
    """The others that decode, in the order of service, as of the last `look`."""
    has_next_kv: bool = True
    _batch: Batch = field(init=False)
    _known: list[ReplaySequence] = field(default_factory=list)
    _tbt_s: float = 0.0
    _facts: BatchFacts | None = None
    _context: int = 0
    """Tokens with KV of the sequences in `_facts`."""

    def __post_init__(self) -> None:
        """Begin with an empty batch."""
        self._batch = Batch(self.latency, _ANY)

    @property
    def batched_made(self) -> dict[int, int]:
        """How many tokens each batched request has made, by the number of the request."""
        return self._batch.made

    def tokens_to_come(self, sequence: ReplaySequence) -> int:
        """See `ServedModel`: the limit of a replayed request is its answer's true length."""
        made = sequence.generated
        return self.answers.rest(made, sequence.request.max_tokens - made)

    @property
    def batched_tokens(self) -> int:
        return self._batch.context_tokens

    def look(self) -> None:
        """Update the sequences that decode, if they have changed."""
        decoding = self.decoding
        if self._known is not decoding:
            batched = self.batched
            self._known, self._facts = decoding, None
            self.unbatched = [one for one in decoding if one.order not in batched]
            self._tbt_s = min([one.tbt_s for one in decoding], default=0.0)

    def batch_facts(
        self, *, now_s: float | None, switch_s: float, prefetched: bool, ready: bool, batch_max: int
    ) -> BatchFacts:
        """See `ServedModel`; computed again only if something has changed."""
        decoding = self.decoding
        if now_s is not None or len(decoding) > batch_max:
            self.dissolve_batch()
            return super().batch_facts(
                now_s=now_s, switch_s=switch_s, prefetched=prefetched, ready=ready, batch_max=batch_max
            )
        assert ready
        if self._known is not decoding:
            self.look()
        context = self._batch.context_tokens
        if self.unbatched:
            context += sum([one.cached for one in self.unbatched])
        facts = self._facts
        if facts is None or context != self._context or switch_s != facts.switch_s or prefetched != facts.prefetched:
            facts = BatchFacts(
                model=self.name,
                sequences=len(decoding),
                step_s=self.estimate.decode_s(context, len(decoding)),
                tbt_s=self._tbt_s,
                switch_s=switch_s,
                prefetched=prefetched,
            )
            self._facts, self._context = facts, context
        return facts

    def kv_needed_bytes(self) -> int:
        """KV of the next step, in which each sequence grows by a token, and swapped KV is loaded; this is so only where
        there is room for one more token of each.
        """
        tokens = len(self._known)
        swapped = [one.kv.moved_tokens for one in self.unbatched if one.kv.location is HOST]
        if swapped:
            tokens += tokens + sum(swapped)
        return tokens * self.kv_bytes_per_token

    def steps_max(self) -> int:
        """Steps until a batched sequence ends; `_ANY` without any."""
        return self._batch.steps_max(0) if self.batched else _ANY

    def join_batch(self, sequence: ReplaySequence, served: Served) -> None:
        """Batch a sequence that has KV for its next token, as all batched ones have."""
        assert self.has_next_kv or not self.batched
        self.has_next_kv = True
        self.batched[sequence.order] = sequence
        self._batch.join(Sequence(served=served, order=sequence.order, cached=sequence.cached))

    def advance_batch(self, fast_forward: FastForward) -> list[ReplaySequence]:
        """Take the steps of a fast-forward. Returns the ended sequences, whose last output is pending."""
        self.has_next_kv = False
        return [
            self._leave_batch(one, pending=1)
            for one in self._batch.advance(fast_forward, fast_forward.ended_s(fast_forward.steps))
        ]

    def dissolve_batch(self) -> None:
        """Take all sequences out of the batch."""
        for one in self._batch.dissolve():
            self._leave_batch(one, pending=0)
        self.look()

    def _leave_batch(self, one: Sequence, *, pending: int) -> ReplaySequence:
        """Update the engine's state of a sequence. `pending`: tokens that are added with its output."""
        sequence = self.batched.pop(one.order)
        sequence.tokens.extend([0] * (one.cached - sequence.cached - pending))
        sequence.cached = one.cached
        sequence.kv.device_bytes = (one.cached + self.has_next_kv) * self.kv_bytes_per_token
        self._known = []
        return sequence


ServedOf = Callable[[str], Served]
"""The record of a request, by its id."""
