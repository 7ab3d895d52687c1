"""A model of a pool's slot, and its sequences that decode in closed form.

Those that ride make a token in every decode step of the model: `Batch` knows what each has made without being told step
by step. What the live engine's books say of a rider (its tokens, its KV) is as of when it got on, until it gets off; a
sum over all riders is always right. Nobody else may look at a rider's books: who wants to has all get off first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.replay.models import ReplayModel, ReplaySequence
from dataplane.scheduling.decode import BatchFacts
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import Sequence, Served
from ops.simulator.servers.batch import Batch

_ANY = 2**62


@dataclass(eq=False, kw_only=True)
class FastForwardModel(ReplayModel):
    """One model. `roomy`: each rider has room for the KV of its next token already."""

    riders: dict[int, ReplaySequence] = field(default_factory=dict)
    """By their `order`."""
    standing: list[ReplaySequence] = field(default_factory=list)
    """Those past their prefill that do not ride, in the order of service, as of the last `look`."""
    roomy: bool = True
    _batch: Batch = field(init=False)
    _known: list[ReplaySequence] = field(default_factory=list)
    _tbt_s: float = 0.0
    _facts: BatchFacts | None = None
    _context: int = 0
    """Tokens with KV of those that `_facts` are about."""

    def __post_init__(self) -> None:
        """Begin without riders."""
        self._batch = Batch(self.latency, _ANY)

    @property
    def riding_tokens(self) -> int:
        return self._batch.context_tokens

    def look(self) -> None:
        """Update the sequences that decode, if they have changed."""
        decoding = self.decoding
        if self._known is not decoding:
            riders = self.riders
            self._known, self._facts = decoding, None
            self.standing = [one for one in decoding if one.order not in riders]
            self._tbt_s = min([one.tbt_s for one in decoding], default=0.0)

    def batch_facts(
        self, *, now_s: float | None, switch_s: float, prefetched: bool, ready: bool, batch_max: int
    ) -> BatchFacts:
        """See `ServedModel`; computed again only if something has changed."""
        decoding = self.decoding
        if now_s is not None or len(decoding) > batch_max:
            self.get_off_all()
            return super().batch_facts(
                now_s=now_s, switch_s=switch_s, prefetched=prefetched, ready=ready, batch_max=batch_max
            )
        assert ready
        if self._known is not decoding:
            self.look()
        context = self._batch.context_tokens
        if self.standing:
            context += sum([one.cached for one in self.standing])
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
        """KV of the next step: swapped KV is loaded, and each sequence grows by a token."""
        tokens = len(self._known)
        if self.standing:
            tokens += sum([one.kv.moved_tokens for one in self.standing if one.kv.location is KvLocation.HOST])
        return tokens * self.kv_bytes_per_token

    def steps_max(self) -> int:
        """Steps until a rider ends; `_ANY` without riders."""
        return self._batch.steps_max(0) if self.riders else _ANY

    def get_on(self, sequence: ReplaySequence, served: Served) -> None:
        """Make a rider of a sequence that has KV for its next token, as all riders have."""
        assert self.roomy or not self.riders
        self.roomy = True
        self.riders[sequence.order] = sequence
        self._batch.join(Sequence(served=served, order=sequence.order, cached=sequence.cached))

    def ride(self, fast_forward: FastForward) -> list[ReplaySequence]:
        """Take the steps of a fast-forward; those that have made their last token get off, and still have to be told of
        it.
        """
        self.roomy = False
        return [
            self._get_off(one, told=1)
            for one in self._batch.advance(fast_forward, fast_forward.ended_s(fast_forward.steps))
        ]

    def get_off_all(self) -> None:
        """Make no sequence a rider."""
        for one in self._batch.dissolve():
            self._get_off(one, told=0)
        self.look()

    def _get_off(self, one: Sequence, *, told: int) -> ReplaySequence:
        """Update the engine's state of a rider. `told`: tokens that are added with its output."""
        sequence = self.riders.pop(one.order)
        sequence.tokens.extend([0] * (one.cached - sequence.cached - told))
        sequence.cached = one.cached
        sequence.kv.device_bytes = (one.cached + self.roomy) * self.kv_bytes_per_token
        self._known = []
        return sequence


ServedOf = Callable[[str], Served]
"""What a request, by its id, has got so far."""
