"""The sequences that an instance decodes together, and their KV. Steps are taken in leaps: see `leaps`."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from dataplane.engines.room import choose_victim
from dataplane.turns.costs import LatencyModel
from dataplane.turns.tiers import TIER_TARGETS
from ops.simulator.leaps import Leap, Pace, decode_pace
from ops.simulator.requests import Served
from ops.simulator.timeline import Timeline

LEAPS_KEPT = 256
"""When there are more, it is seen to which of them nobody needs."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request on an instance. `order`: place in the order of arrival. `cached`: tokens with KV, as of when it joined
    the batch; it did so after `joined` steps.
    """

    served: Served
    order: int
    cached: int = 0
    joined: int = 0

    @property
    def model(self) -> str:
        """The model's name."""
        return self.served.request.model

    @property
    def key(self) -> tuple[int, int]:
        """The order of service: by tier, then first come, first served."""
        return TIER_TARGETS[self.served.request.tier].rank, self.order

    @property
    def last_step(self) -> int:
        """The step that makes its last token, if it stays in the batch."""
        return self.joined + self.served.left


class Batch:
    """Decodes. `kv_tokens_max`: what the KV of its sequences, each with the token to come, may take."""

    def __init__(self, latency: LatencyModel, kv_tokens_max: int) -> None:
        self.context_tokens = 0
        self._latency = latency
        self._kv_tokens_max = kv_tokens_max
        self._timeline = Timeline()
        self._sequences: dict[int, Sequence] = {}
        self._ends: list[tuple[int, int]] = []
        self._tbts: dict[float, int] = {}

    def __len__(self) -> int:
        """How many decode."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that decode."""
        return iter(self._sequences.values())

    @property
    def kv_tokens(self) -> int:
        """What its KV takes: all contexts, and room for one more token of each."""
        return self.context_tokens + len(self._sequences)

    @property
    def tbt_s(self) -> float:
        """The tightest target in it, by which turns are planned."""
        return min(self._tbts)

    @property
    def pace(self) -> Pace:
        """How long its next steps take."""
        return decode_pace(self._latency, self.context_tokens, len(self._sequences))

    def join(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        assert sequence.served.left > 0
        sequence.joined = self._timeline.step
        self._timeline.expect(sequence.served.target.tbt_s)
        self._sequences[sequence.order] = sequence
        self.context_tokens += sequence.cached
        heappush(self._ends, (sequence.last_step, sequence.order))
        tbt_s = TIER_TARGETS[sequence.served.request.tier].tbt_s
        self._tbts[tbt_s] = self._tbts.get(tbt_s, 0) + 1

    def steps_max(self, reserved_tokens: int) -> int:
        """Steps until a sequence ends or KV runs out, `reserved_tokens` of it being others'."""
        while self._ends[0][1] not in self._sequences or self._ends[0][0] != self._last_step(self._ends[0][1]):
            heappop(self._ends)
        free_tokens = self._kv_tokens_max - reserved_tokens - self.context_tokens
        return min(self._ends[0][0] - self._timeline.step, free_tokens // len(self._sequences))

    def advance(self, leap: Leap) -> list[Sequence]:
        """Take the steps of a leap, and let those out that have ended, in order of arrival."""
        self._timeline.add(leap)
        self.context_tokens += leap.steps * len(self._sequences)
        ended = []
        while self._ends and self._ends[0][0] <= self._timeline.step:
            last_step, order = heappop(self._ends)
            if order in self._sequences and last_step == self._last_step(order):
                ended.append(self._leave(self._sequences[order], leap.ended_s(leap.steps)))
        if not self._sequences:
            self._timeline.forget(self._timeline.step + 1)
        elif len(self._timeline) > LEAPS_KEPT:
            self._timeline.forget(min(sequence.joined for sequence in self) + 1)
        return ended

    def drive_out(self, now_s: float) -> Sequence:
        """Who gives its KV up, so that the first in the order of service goes on; that itself, where it is alone."""
        first = min(self, key=lambda sequence: sequence.key)
        return self._leave(choose_victim(self, first) or first, now_s)

    def _last_step(self, order: int) -> int:
        return self._sequences[order].last_step

    def _leave(self, sequence: Sequence, now_s: float) -> Sequence:
        """Take a sequence out, and write down what it got."""
        served, timeline = sequence.served, self._timeline
        tokens = timeline.step - sequence.joined
        del self._sequences[sequence.order]
        sequence.cached += tokens
        self.context_tokens -= sequence.cached
        tbt_s = TIER_TARGETS[served.request.tier].tbt_s
        self._tbts[tbt_s] -= 1
        if not self._tbts[tbt_s]:
            del self._tbts[tbt_s]
        if tokens:
            first, due_s, target_s = sequence.joined + 1, served.next_due_s, served.target.tbt_s
            late_s = timeline.late_s(first, due_s, target_s)
            in_time = tokens if late_s <= 0 else timeline.in_time(first, due_s, target_s)
            served.take(tokens, late_s, in_time, now_s)
        return sequence
