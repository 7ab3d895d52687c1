"""The sequences that an instance decodes together, and their KV. Steps are taken in leaps: see `leaps`."""

from collections.abc import Iterator
from heapq import heappop, heappush

from msgspec import Struct

from dataplane.engines.room import choose_victim
from dataplane.turns.costs import LatencyModel
from dataplane.turns.tiers import TIER_RANKS
from ops.simulator.leaps import Leap, Pace, decode_pace
from ops.simulator.requests import Served
from ops.simulator.timeline import Timeline

LEAPS_KEPT = 256
"""When there are more, and twice as many as were needed the last time, it is seen to which of them nobody needs."""


class Sequence(Struct, eq=False, kw_only=True):
    """A request on an instance. `order`: place in the order of arrival. `cached`: tokens with KV, as of when it joined
    the batch; it did so after `joined` steps, and step `last_step` makes its last token if it stays.
    """

    served: Served
    order: int
    cached: int = 0
    joined: int = 0
    last_step: int = 0

    @property
    def model(self) -> str:
        """The model's name."""
        return self.served.request.model

    @property
    def key(self) -> tuple[int, int]:
        """The order of service: by tier, then first come, first served."""
        return TIER_RANKS[self.served.request.tier], self.order


class Batch:
    """Decodes. `kv_tokens_max`: what the KV of its sequences, each with the token to come, may take. `size`: how many
    they are, with `context_tokens` together.
    """

    def __init__(self, latency: LatencyModel, kv_tokens_max: int) -> None:
        self.size = 0
        self.context_tokens = 0
        self._latency = latency
        self._kv_tokens_max = kv_tokens_max
        self._timeline = Timeline()
        self._sequences: dict[int, Sequence] = {}
        self._ends: list[tuple[int, int]] = []
        """The last step and the order of those that decode, as a heap; some that left early may still be there."""
        self._leaps_max = LEAPS_KEPT

    def __iter__(self) -> Iterator[Sequence]:
        """Those that decode."""
        return iter(self._sequences.values())

    @property
    def kv_tokens(self) -> int:
        """What its KV takes: all contexts, and room for one more token of each."""
        return self.context_tokens + self.size

    @property
    def pace(self) -> Pace:
        """How long its next steps take."""
        return decode_pace(self._latency, self.context_tokens, self.size)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        served, step = sequence.served, self._timeline.step
        left = served.request.output_tokens - served.made
        assert left > 0
        sequence.joined, sequence.last_step = step, step + left
        self._timeline.expect(served.target.tbt_s)
        self._sequences[sequence.order] = sequence
        self.size += 1
        self.context_tokens += sequence.cached
        heappush(self._ends, (sequence.last_step, sequence.order))

    def steps_max(self, reserved_tokens: int) -> int:
        """Steps until a sequence ends or KV runs out, `reserved_tokens` of it being others'."""
        while self._ending() is None:
            heappop(self._ends)
        steps = self._ends[0][0] - self._timeline.step
        free_tokens = self._kv_tokens_max - reserved_tokens - self.context_tokens
        return steps if steps * self.size <= free_tokens else free_tokens // self.size

    def advance(self, leap: Leap, over_s: float) -> list[Sequence]:
        """Take the steps of a leap that is over at `over_s`, and let those out that have ended, in order of arrival."""
        timeline, ends = self._timeline, self._ends
        timeline.add(leap, over_s)
        self.context_tokens += leap.steps * self.size
        ended = []
        while ends and ends[0][0] <= timeline.step:
            if (sequence := self._ending()) is not None:
                ended.append(self._leave(sequence, over_s))
            heappop(ends)
        if not self.size:
            timeline.forget(timeline.step + 1)
        elif len(timeline.leaps) > self._leaps_max:
            timeline.forget(min(sequence.joined for sequence in self) + 1)
            self._leaps_max = max(LEAPS_KEPT, 2 * len(timeline.leaps))
        return ended

    def drive_out(self, now_s: float) -> Sequence:
        """Who gives its KV up, so that the first in the order of service goes on; that itself, where it is alone."""
        first = min(self, key=lambda sequence: sequence.key)
        return self._leave(choose_victim(self, first) or first, now_s)

    def dissolve(self) -> list[Sequence]:
        """Let all out, in order of their joining."""
        return [self._leave(sequence, self._timeline.over_s) for sequence in list(self)]

    def _ending(self) -> Sequence | None:
        """Who ends first; None if the entry that says so has been overtaken."""
        last_step, order = self._ends[0]
        sequence = self._sequences.get(order)
        return sequence if sequence is not None and sequence.last_step == last_step else None

    def _leave(self, sequence: Sequence, now_s: float) -> Sequence:
        """Take a sequence out, and write down what it got."""
        served, timeline = sequence.served, self._timeline
        tokens = timeline.step - sequence.joined
        del self._sequences[sequence.order]
        self.size -= 1
        sequence.cached += tokens
        self.context_tokens -= sequence.cached
        if tokens:
            first, due_s, target_s = sequence.joined + 1, served.next_due_s, served.target.tbt_s
            late_s = timeline.late_s(first, due_s, target_s)
            in_time = tokens if late_s <= 0 else timeline.in_time(first, due_s, target_s)
            served.take(tokens, late_s, in_time, now_s)
        return sequence
