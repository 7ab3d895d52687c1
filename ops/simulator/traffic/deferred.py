"""Deferred requests (NIW) that wait in the control plane, and what the live release policy lets go at each view.

A model's requests wait as one batch of one tenant. Nothing in the simulated world refuses a deferred request. One whose
window is over before it was let go expires. Views are new when requests are released, so nothing is sent beside them;
of the requests in flight, the instances know how many tokens they have still to make.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from controlplane.policies.facts import Backlog, Endpoint, GroupFacts, InstanceFacts, ReleaseFacts, Window
from controlplane.policies.release import ReleaseSettings, choose_releases, choose_windows
from ops.simulator.kernel.requests import Request

TENANT = "simulated"
_INTERACTIVE_S = 60.0
"""How long an endpoint counts as one with interactive requests."""


class Deferred:
    """The queues. `window_s`: from a request's arrival to its deadline."""

    def __init__(self, settings: ReleaseSettings, window_s: float) -> None:
        self.released = 0
        self._settings = settings
        self._window_s = window_s
        self._queues: dict[str, deque[Request]] = {}
        self._tokens: dict[str, int] = {}
        self._again: set[int] = set()
        self._windows: dict[Endpoint, Window] = {}
        self._in_flight: Counter[Endpoint] = Counter()
        self._endpoints: dict[int, Endpoint] = {}
        """Where the requests in flight were released to."""
        self._interactive_s: dict[Endpoint, float] = {}
        """When each endpoint was last asked for an interactive answer."""
        self._ended: dict[str, tuple[int, int]] = {}
        """By model, the requests that have ended, and their tokens."""

    def add(self, request: Request) -> None:
        self._queues.setdefault(request.model, deque()).append(request)
        self._tokens[request.model] = self._tokens.get(request.model, 0) + request.prompt_tokens

    def note_interactive(self, request: Request) -> None:
        self._interactive_s[Endpoint(model=request.model, region=request.origin)] = request.arrived_s

    def put_back(self, request: Request) -> None:
        """Queue a released request again, in the order of arrival: the first of a queue is its oldest."""
        self._leave(request)
        self._again.add(request.number)
        queue = self._queues[request.model]
        place = next((at for at, one in enumerate(queue) if one.number > request.number), len(queue))
        queue.insert(place, request)
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
        facts = ReleaseFacts(
            groups=groups,
            instances=_with_growth(instances),
            windows=self._windows,
            in_flight=self._in_flight,
            interactive=frozenset(
                endpoint for endpoint, at_s in self._interactive_s.items() if now_s - at_s <= _INTERACTIVE_S
            ),
        )
        self._windows |= choose_windows(facts, frozenset(), now_s, self._settings)
        releases = choose_releases(dataclasses.replace(facts, windows=self._windows), now_s, self._settings)
        for release, count in Counter(releases).items():
            for _ in range(count):
                self.released += 1
                request = self._take(self._queues[models[release.batch]])
                first = request.number not in self._again
                self._again.discard(request.number)
                self._endpoints[request.number] = release.endpoint
                self._in_flight[release.endpoint] += 1
                yield request, release.endpoint.region, first

    def note_over(self, request: Request) -> None:
        """Count a request as no longer in flight, and what it took."""
        if self._leave(request):
            count, tokens = self._ended.get(request.model, (0, 0))
            self._ended[request.model] = count + 1, tokens + request.prompt_tokens + request.output_tokens

    def _leave(self, request: Request) -> bool:
        """Whether the request was in flight."""
        endpoint = self._endpoints.pop(request.number, None)
        if endpoint is not None:
            self._in_flight[endpoint] -= 1
        return endpoint is not None

    def _take(self, queue: deque[Request]) -> Request:
        request = queue.popleft()
        self._tokens[request.model] -= request.prompt_tokens
        return request

    def _group(self, batch: int, model: str, now_s: float) -> GroupFacts | None:
        queue = self._queues[model]
        if not queue:
            return None
        age_s = now_s - queue[0].arrived_s
        count, tokens = self._ended.get(model, (0, 0))
        return GroupFacts(
            batch=batch,
            tenant=TENANT,
            model=model,
            waiting=len(queue),
            left=len(queue) + sum(count for endpoint, count in self._in_flight.items() if endpoint.model == model),
            input_tokens=self._tokens[model] / len(queue),
            age_s=age_s,
            left_s=self._window_s - age_s,
            tokens=tokens / count if count else None,
        )


def _with_growth(instances: Sequence[InstanceFacts]) -> tuple[InstanceFacts, ...]:
    """The instances with the KV memory that their requests will still take. The cluster of a request-level server has
    no bytes a token.
    """
    return tuple(replace(each, deferred_tokens=float(each.remaining_tokens)) for each in instances)
