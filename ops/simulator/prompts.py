"""The prompts that wait on an instance, in the live slot's own queue and order."""

from collections.abc import Iterable, Iterator

from dataplane.turns.prefill import GroupState, PrefillQueue, PrefillRequest, PrefillSettings, choose_group
from ops.simulator.batch import Sequence
from ops.simulator.costs import ModelCosts


class Prompts:
    """Those that came since the last step, and the queue, where all of one model stand in groups."""

    def __init__(self, model: ModelCosts, settings: PrefillSettings) -> None:
        self.queue = PrefillQueue()
        self._model = model
        self._settings = settings
        self._new: list[Sequence] = []
        self._waiting: dict[str, Sequence] = {}
        self._groups = GroupState()

    @property
    def has_new(self) -> bool:
        """Whether some came since the last step."""
        return bool(self._new)

    @property
    def load_s(self) -> float:
        """Seconds that those in the queue will take."""
        return self.queue.load_s(self._prefill_s, lambda _: 0.0, self._model.name)

    @property
    def begun(self) -> tuple[str, ...]:
        """Those that hold their room already: while the first in order finds none, they go on."""
        return tuple(request_id for request_id, sequence in self._waiting.items() if sequence.cached)

    def add(self, sequence: Sequence) -> None:
        """One came."""
        self._new.append(sequence)

    def queue_new(self, now_s: float) -> None:
        """Queue those that came, as between two steps."""
        for sequence in self._new:
            request = PrefillRequest(
                request_id=str(sequence.order),
                model=self._model.name,
                tokens=sequence.served.request.prompt_tokens,
                tier=sequence.served.request.tier,
                arrived_s=now_s,
            )
            self._waiting[request.request_id] = sequence
            self.queue = self.queue.join(request, self._settings)
        self._new.clear()

    def find(self, request_ids: Iterable[str]) -> Iterator[Sequence]:
        """Those of these ids, in that order."""
        return map(self._waiting.__getitem__, request_ids)

    def remove(self, sequence: Sequence) -> None:
        """One is past its prefill."""
        request_id = str(sequence.order)
        del self._waiting[request_id]
        self.queue = self.queue.remove(request_id)

    def first_group(self, now_s: float) -> tuple[str, ...]:
        """The group that goes first, in order; there is one."""
        choice = choose_group(self.queue.groups, self._model.name, self._groups, now_s, self._settings)
        assert choice is not None
        self._groups = choice.state
        return tuple(request.request_id for request in choice.group.in_order(now_s, self._settings))

    def _prefill_s(self, request: PrefillRequest) -> float:
        return self._model.latency.prefill_s(request.tokens, request.tokens**2)
