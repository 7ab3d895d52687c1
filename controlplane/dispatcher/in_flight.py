"""What this dispatcher has in flight, by endpoint and instance: told apart from what instances report of all others."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controlplane.policies.decisions import Release, Route
from controlplane.policies.facts import Endpoint, InstanceFacts, SlotId
from controlplane.serving.fan_out import InFlightQuery
from controlplane.store.queue import Claim

_FORGET_S = 60.0


@dataclass(eq=False, kw_only=True)
class Line:
    """A claimed request. `released_to`: the instance that has room for it. `expected_tokens`: of KV memory in the end.
    `began_s`, `ended_s`: by `time.monotonic`. When its instance reported last, it had `reported_tokens`; before its
    first report, None.
    """

    claim: Claim
    endpoint: Endpoint
    released_to: str
    expected_tokens: float
    began_s: float
    query: InFlightQuery | None = None
    ended_s: float | None = None
    reported_s: float = 0.0
    reported_tokens: int | None = None

    @property
    def instance_id(self) -> str | None:
        """The instance that it was sent to last."""
        return None if self._route is None else self._route.instance_id

    @property
    def sent_to(self) -> Endpoint:
        """Where it was sent last, which may be another region if none has room for it in its own."""
        return self.endpoint if self._route is None else replace(self.endpoint, region=self._route.region)

    @property
    def _route(self) -> Route | None:
        return self.query.first.routes[-1] if self.query is not None and self.query.first.routes else None

    @property
    def tokens(self) -> int:
        return 0 if self.query is None else self.query.used_tokens

    @property
    def requests(self) -> int:
        return 1 if self.query is None else len(self.query.choices)

    def note_report(self, reported_s: float) -> None:
        """Note the instance's newest report, which arrived at `reported_s`."""
        if reported_s > self.reported_s:
            self.reported_s = reported_s
            self.reported_tokens = self.tokens if self.began_s <= reported_s else None


class LinesInFlight:
    """The lines that run, and those that have ended since their instances reported."""

    def __init__(self) -> None:
        self._running: set[Line] = set()
        self._ended: deque[Line] = deque()
        self._by_endpoint: Counter[Endpoint] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, claim: Claim, release: Release, expected_tokens: float) -> Line:
        line = Line(
            claim=claim,
            endpoint=release.endpoint,
            released_to=release.instance_id,
            expected_tokens=expected_tokens,
            began_s=time.monotonic(),
        )
        self._running.add(line)
        self._by_endpoint[release.endpoint] += 1
        return line

    def end(self, line: Line) -> None:
        line.ended_s = time.monotonic()
        self._running.discard(line)
        self._ended.append(line)
        self._by_endpoint[line.endpoint] -= 1

    def by_endpoint(self) -> dict[Endpoint, int]:
        """How many run at each endpoint."""
        return dict(+self._by_endpoint)

    def tell_apart(
        self, instances: Iterable[InstanceFacts], reported_s: Mapping[str, float]
    ) -> tuple[InstanceFacts, ...]:
        """The instances with the lines as `deferred` requests, and without them in `requests` and `kv_used_bytes`.
        `reported_s`: when each instance's last report arrived, by `time.monotonic`.
        """
        loads: dict[str, _Load] = {}
        for line in self._running:
            if (name := line.instance_id) is not None:
                line.note_report(reported_s.get(name, 0.0))
                load = loads.setdefault(name, _Load())
                load.note_reported(line)
                load.requests += line.requests
                load.tokens += max(line.expected_tokens, line.tokens)
        self._forget_reported(reported_s)
        for line in self._ended:
            if (name := line.instance_id) is not None:
                loads.setdefault(name, _Load()).note_reported(line)
        return _without(tuple(instances), loads)

    def _forget_reported(self, reported_s: Mapping[str, float]) -> None:
        """Forget the lines that ended before the last reports of their instances."""
        oldest_s = time.monotonic() - _FORGET_S
        kept = [
            line
            for line in self._ended
            if line.ended_s is not None
            and line.ended_s > max(oldest_s, reported_s.get(line.instance_id or "", oldest_s))
        ]
        self._ended = deque(kept)


@dataclass
class _Load:
    """Lines on one instance: what is there now, and what its last report counts."""

    requests: int = 0
    tokens: float = 0.0
    reported_requests: int = 0
    reported_tokens: int = 0

    def note_reported(self, line: Line) -> None:
        if line.reported_tokens is not None:
            self.reported_requests += line.requests
            self.reported_tokens += line.reported_tokens


def _without(instances: tuple[InstanceFacts, ...], loads: Mapping[str, _Load]) -> tuple[InstanceFacts, ...]:
    """A multiplexed slot reports the KV memory that all its models use for each of them."""
    by_slot: dict[SlotId, list[tuple[InstanceFacts, int]]] = {}
    for instance in instances:
        reported_bytes = loads.get(instance.instance_id, _NO_LOAD).reported_tokens * instance.kv_bytes_per_token
        slot = SlotId(node_id=instance.node_id, number=instance.slot)
        by_slot.setdefault(slot, []).append((instance, reported_bytes))
    found = []
    for here in by_slot.values():
        for instance, own_bytes in here:
            load = loads.get(instance.instance_id, _NO_LOAD)
            model = instance.endpoint.model
            shared_bytes = sum(reported for other, reported in here if other.endpoint.model != model)
            found.append(
                replace(
                    instance,
                    requests=max(0, instance.requests - load.reported_requests),
                    kv_used_bytes=max(0, instance.kv_used_bytes - own_bytes - shared_bytes),
                    deferred_requests=load.requests,
                    deferred_tokens=load.tokens,
                    sent_tokens=0,
                    sent_requests=0,
                )
            )
    return tuple(found)


_NO_LOAD = _Load()
