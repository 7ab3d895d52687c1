"""Deferred requests (NIW) that wait in the control plane, and what the live release policy lets go at each signal.

A model's requests wait as one batch of one tenant. Nothing in the simulated world refuses a deferred request. One whose
window is over before it was let go expires.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from controlplane.policies.facts import Backlog, Backoff, Endpoint, GroupFacts, InstanceFacts, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_backoff, choose_releases
from ops.simulator.kernel.requests import Request

TENANT = "simulated"


class Deferred:
    """The queues. `window_s`: from a request's arrival to its deadline."""

    def __init__(self, settings: ReleaseSettings, window_s: float) -> None:
        self.released = 0
        self._settings = settings
        self._window_s = window_s
        self._queues: dict[str, deque[Request]] = {}
        self._tokens: dict[str, int] = {}
        self._again: set[int] = set()
        self._backoffs: Mapping[Endpoint, Backoff] = {}

    def add(self, request: Request) -> None:
        self._queues.setdefault(request.model, deque()).append(request)
        self._tokens[request.model] = self._tokens.get(request.model, 0) + request.prompt_tokens

    def put_back(self, request: Request) -> None:
        """Queue a released request again, first."""
        self._again.add(request.number)
        self._queues[request.model].appendleft(request)
        self._tokens[request.model] += request.prompt_tokens

    def waiting(self, now_s: float) -> dict[str, tuple[int, float]]:
        """Queue length and age of the oldest request by model; 0 in empty queues."""
        queues = self._queues.items()
        return {model: (len(queue), now_s - queue[0].arrived_s if queue else 0.0) for model, queue in queues}

    def backlog(self, model: str) -> Backlog | None:
        """The queued requests of a model; None if there are none."""
        queue = self._queues.get(model)
        if not queue:
            return None
        return Backlog(tokens=float(self._tokens[model]), due_s=queue[0].arrived_s + self._window_s)

    def expire(self, now_s: float) -> Iterator[Request]:
        """Remove requests whose window has passed."""
        for queue in self._queues.values():
            while queue and queue[0].arrived_s + self._window_s <= now_s:
                yield self._take(queue)

    def release(self, instances: tuple[InstanceFacts, ...], now_s: float) -> Iterator[tuple[Request, str, bool]]:
        """Requests to send now, each with its region and whether it was never released before."""
        models = list(self._queues)
        found = (self._group(batch, model, now_s) for batch, model in enumerate(models))
        groups = tuple(group for group in found if group is not None)
        if not groups:
            return
        before = ReleaseFacts(groups=groups, instances=instances, backoffs=self._backoffs)
        self._backoffs = choose_backoff(before, frozenset(), now_s, self._settings)
        facts = ReleaseFacts(groups=groups, instances=instances, backoffs=self._backoffs)
        for release in choose_releases(facts, now_s, self._settings):
            for _ in range(release.count):
                self.released += 1
                request = self._take(self._queues[models[release.batch]])
                first = request.number not in self._again
                self._again.discard(request.number)
                yield request, release.endpoint.region, first

    def _take(self, queue: deque[Request]) -> Request:
        request = queue.popleft()
        self._tokens[request.model] -= request.prompt_tokens
        return request

    def _group(self, batch: int, model: str, now_s: float) -> GroupFacts | None:
        queue = self._queues[model]
        if not queue:
            return None
        age_s = now_s - queue[0].arrived_s
        return GroupFacts(
            batch=batch, tenant=TENANT, model=model, waiting=len(queue), age_s=age_s, left_s=self._window_s - age_s
        )
