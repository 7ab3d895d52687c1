"""Deferred requests (NIW) that wait in the control plane, and what the live release policy lets go at each signal.

A model's requests wait as one batch of one tenant. Nothing in the simulated world refuses a deferred request.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from controlplane.policies.facts import Backoff, Endpoint, InstanceFacts, LotFacts, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_backoff, choose_releases
from ops.simulator.requests import Request

TENANT = "simulated"


class Deferred:
    """The queues. `window_s`: from a request's arrival to its deadline."""

    def __init__(self, settings: ReleaseSettings, window_s: float) -> None:
        self.released = 0
        self._settings = settings
        self._window_s = window_s
        self._queues: dict[str, deque[Request]] = {}
        self._backoffs: Mapping[Endpoint, Backoff] = {}

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self._queues.setdefault(request.model, deque()).append(request)

    def release(self, instances: tuple[InstanceFacts, ...], now_s: float) -> Iterator[tuple[Request, str]]:
        """Requests to send now, each to a region."""
        models = list(self._queues)
        found = (self._lot(batch, model, now_s) for batch, model in enumerate(models))
        lots = tuple(lot for lot in found if lot is not None)
        if not lots:
            return
        before = ReleaseFacts(lots=lots, instances=instances, backoffs=self._backoffs)
        self._backoffs = choose_backoff(before, frozenset(), now_s, self._settings)
        facts = ReleaseFacts(lots=lots, instances=instances, backoffs=self._backoffs)
        for release in choose_releases(facts, now_s, self._settings):
            for _ in range(release.count):
                self.released += 1
                yield self._queues[models[release.batch]].popleft(), release.endpoint.region

    def _lot(self, batch: int, model: str, now_s: float) -> LotFacts | None:
        queue = self._queues[model]
        if not queue:
            return None
        age_s = now_s - queue[0].arrived_s
        return LotFacts(
            batch=batch, tenant=TENANT, model=model, waiting=len(queue), age_s=age_s, left_s=self._window_s - age_s
        )
