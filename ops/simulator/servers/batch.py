"""The sequences that an instance decodes together, and their KV. Steps are taken many at once: see `fast_forwards`."""

from collections.abc import Iterator
from collections.abc import Sequence as Table
from heapq import heapify, heappop, heappush

from dataplane.engines.core.kv_allocator import choose_victim
from dataplane.scheduling.costs import LatencyModel
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import Sequence
from ops.simulator.kernel.timeline import Timeline

FAST_FORWARDS_KEPT = 256
"""When there are more, and twice as many as were needed the last time, it is seen to which of them nobody needs."""


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
        self._ends: list[tuple[int, int, int, Sequence]] = []
        """Those that decode by their last step and order, as a heap; with the step after which they had no token."""
        self._fast_forwards_max = FAST_FORWARDS_KEPT

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, _, sequence in self._ends)

    @property
    def left(self) -> int:
        """Tokens that its answers will still have."""
        return sum([end for end, _, _, _ in self._ends]) - self._timeline.step * self.size

    def summed(self, rests: Table[int]) -> int:
        """See `answers.Unfinished`."""
        step = self._timeline.step
        try:
            return sum([rests[step - began] for _, _, began, _ in self._ends])
        except IndexError:
            last = len(rests) - 1
            return sum([rests[min(step - began, last)] for _, _, began, _ in self._ends])

    @property
    def made(self) -> dict[int, int]:
        """Tokens that each answer has, by the number of its request."""
        step = self._timeline.step
        return {sequence.served.request.number: step - began for _, _, began, sequence in self._ends}

    @property
    def kv_tokens(self) -> int:
        """KV of all contexts, and of one more token of each sequence."""
        return self.context_tokens + self.size

    @property
    def tbt_s(self) -> float:
        """The tightest time between tokens in it."""
        return min([sequence.served.target.tbt_s for sequence in self])

    def join(self, sequence: Sequence) -> None:
        """Decode a sequence from the next step on."""
        served, timeline = sequence.served, self._timeline
        left = served.request.output_tokens - served.made
        assert left > 0
        sequence.joined = timeline.step
        timeline.expect(served.target.tbt_s)
        self.size += 1
        self.context_tokens += sequence.cached
        heappush(self._ends, (timeline.step + left, sequence.order, timeline.step - served.made, sequence))

    def steps_max(self, reserved_tokens: int) -> int:
        """Steps until a sequence ends or KV is full, `reserved_tokens` of it being others'."""
        steps = self._ends[0][0] - self._timeline.step
        free_tokens = self._kv_tokens_max - reserved_tokens - self.context_tokens
        return steps if steps * self.size <= free_tokens else free_tokens // self.size

    def fast_forward(self, now_s: float, steps_max: int, reserved_tokens: int) -> FastForward | None:
        """The next steps, at most `steps_max`; None if KV is full or the batch is empty."""
        if not self.size:
            return None
        steps = self.steps_max(reserved_tokens)
        if steps < 1:
            return None
        first_s, growth_s = self._latency.decode_pace_s(self.context_tokens, self.size)
        return FastForward(now_s, first_s, growth_s, steps if steps < steps_max else steps_max)

    def advance(self, fast_forward: FastForward, over_s: float) -> list[Sequence]:
        """Take the steps of a fast-forward that is over at `over_s`, and let those out that have ended, in order of
        arrival.
        """
        timeline, ends = self._timeline, self._ends
        timeline.add(fast_forward, over_s)
        self.context_tokens += fast_forward.steps * self.size
        step, ended = timeline.step, []
        while ends and ends[0][0] <= step:
            ended.append(self._leave(heappop(ends)[3], over_s))
        if not ends:
            timeline.forget(step + 1)
        elif len(timeline.fast_forwards) > self._fast_forwards_max:
            timeline.forget(min(sequence.joined for sequence in self) + 1)
            self._fast_forwards_max = max(FAST_FORWARDS_KEPT, 2 * len(timeline.fast_forwards))
        return ended

    def drive_out(self, now_s: float) -> Sequence:
        """Preempt a sequence, so that the first in the order of service can go on; that one itself if it is alone."""
        first = min(self, key=lambda sequence: sequence.key)
        victim = choose_victim(self, first) or first
        self._ends = [entry for entry in self._ends if entry[3] is not victim]
        heapify(self._ends)
        return self._leave(victim, now_s)

    def dissolve(self) -> list[Sequence]:
        """Remove all sequences, in the order in which they would have ended."""
        ends, self._ends = sorted(self._ends), []
        return [self._leave(sequence, self._timeline.over_s) for _, _, _, sequence in ends]

    def _leave(self, sequence: Sequence, now_s: float) -> Sequence:
        """Remove a sequence, and count its tokens."""
        served, timeline = sequence.served, self._timeline
        tokens = timeline.step - sequence.joined
        self.size -= 1
        sequence.cached += tokens
        self.context_tokens -= sequence.cached
        if tokens:
            first, due_s, target_s = sequence.joined + 1, served.next_due_s, served.target.tbt_s
            late_s = timeline.late_s(first, due_s, target_s)
            in_time = tokens if late_s <= 0 else timeline.in_time(first, due_s, target_s)
            served.take(tokens, late_s, in_time, now_s)
        return sequence
