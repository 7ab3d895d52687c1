"""The prompts that wait on an instance, in the live slot's own queue and order.

One that waits alone is first in any order: nobody is asked, and it is queued when a second one comes.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.prefill import GroupState, PrefillQueue, PrefillRequest, PrefillSettings, choose_group
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from ops.simulator.kernel.costs import ModelCosts
from ops.simulator.kernel.requests import Sequence, Served


class Prompts:
    """Waiting prompts, in groups by model. `new`: arrived since the last step."""

    def __init__(self, model: ModelCosts, settings: PrefillSettings) -> None:
        self._model = model
        self._settings = settings
        self.new: list[Sequence] = []
        self.waiting: dict[int, Sequence] = {}
        """By their order of arrival."""
        self._alone: tuple[Sequence, float] | None = None
        """Who waits but is not queued, and since when."""
        self._began = 0
        """Who was the last to go first without being queued."""
        self._queue = PrefillQueue()
        self._groups = GroupState()
        self._promised_s: dict[Tier, float] = {}

    def wait_s(self, tier: Tier, now_s: float) -> float:
        """Prefill time of the waiting prompts that one of the tier, promised what its last one was, could not overtake
        if it came now.
        """
        if not self.waiting:
            return 0.0
        self._queue_alone()
        ttft_s = self._promised_s.get(tier, TIER_OBJECTIVES[tier].ttft_s)
        ahead = self._queue.ahead_of(self._model.name, tier, ttft_s, now_s, self._settings)
        return ahead.load_s(lambda waiting: sum(map(self._prefill_s, waiting)), lambda _: 0.0, self._model.name)

    @property
    def soonest(self) -> tuple[float, float]:
        """When the first of their first tokens is due, and the prefill time of the prompt that came first."""
        if self._alone:
            request = self._request(*self._alone)
            return request.deadline_s, self._prefill_s(request)
        groups = self._queue.groups
        due_s = min([request.deadline_s for group in groups for request in group.waiting])
        return due_s, self._prefill_s(groups[0].waiting[0])

    @property
    def begun(self) -> list[Sequence]:
        """Prompts with KV: they go on while KV lacks for the first in order."""
        return [sequence for sequence in self.waiting.values() if sequence.cached]

    def take_in(self, now_s: float) -> None:
        """Queue new prompts, between two steps."""
        for sequence in self.new:
            served = sequence.served
            self._promised_s[served.request.tier] = served.target.ttft_s
            if self.waiting:
                self._queue_alone()
                self._join(sequence, now_s)
            else:
                self._alone = sequence, now_s
            self.waiting[sequence.order] = sequence
        self.new.clear()

    def remove(self, sequence: Sequence) -> None:
        del self.waiting[sequence.order]
        if self._alone:
            self._alone = None
        else:
            self._queue = self._queue.remove(str(sequence.order))

    def take_back(self, served: Served) -> Sequence:
        """Remove a prompt that has not begun."""
        for sequence in self.new:
            if sequence.served is served:
                self.new.remove(sequence)
                return sequence
        sequence = next(one for one in self.waiting.values() if one.served is served)
        self.remove(sequence)
        return sequence

    def first_group(self, now_s: float) -> Iterable[Sequence]:
        """The first group, in order."""
        if self._alone:
            first, _ = self._alone
            self._began = first.order
            return (first,)
        choice = choose_group(self._queue.groups, self._model.name, self._groups, now_s, self._settings)
        assert choice is not None
        self._groups = choice.state
        return [self.waiting[int(one.request_id)] for one in choice.group.in_order(now_s, self._settings)]

    def _queue_alone(self) -> None:
        """Queue the prompt that waits alone, as its own group, which is being served if it has gone first."""
        if self._alone:
            self._join(*self._alone)
            if self._began == self._alone[0].order:
                self._groups = replace(self._groups, serving=str(self._began))
            self._alone = None

    def _join(self, sequence: Sequence, came_s: float) -> None:
        self._queue = self._queue.join(self._request(sequence, came_s), self._settings)

    def _request(self, sequence: Sequence, came_s: float) -> PrefillRequest:
        return PrefillRequest(
            request_id=str(sequence.order),
            model=self._model.name,
            tokens=sequence.served.request.prompt_tokens - sequence.expected,
            tier=sequence.served.request.tier,
            arrived_s=came_s,
            ttft_s=sequence.served.target.ttft_s,
        )

    def _prefill_s(self, request: PrefillRequest) -> float:
        return self._model.latency.prefill_s(request.tokens, request.tokens**2)
