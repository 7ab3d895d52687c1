"""How many deferred requests (NIW) are released to which endpoint when it has capacity (SageServe 6.2), and whose.

Capacity first: releases follow fresh reports alone, and an endpoint that is overloaded gets none during a backoff that
doubles. Models that share a slot share its capacity. Then order: urgent requests (old, or near their deadline) before
others, tenants in rotation, and of a tenant the nearest deadline.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controlplane.policies.decisions import Release
from controlplane.policies.facts import Backoff, Endpoint, GroupFacts, InstanceFacts, ReleaseFacts, SlotId
from controlplane.policies.routing import is_usable, utilization_of
from dataplane.protocol.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """An endpoint whose utilization is below `below_one` takes one request a signal, below `below_two` two. Urgent
    requests, older than `aged_s` or with less than `left_share` of their window left, count as interactive: they are
    released up to `urgent_utilization_max`.

    Overload is a node's load above `load_max`, a refusal, or a rise of utilization by more than `rise_max` between two
    releases to above `below_two`. It pauses an endpoint for `pause_min_s`, doubled each time up to `pause_max_s`, and
    halved after each such period without overload. Models that share a slot receive NIW in time slices of
    `time_slice_s`.
    """

    below_one: float = 0.6
    below_two: float = 0.5
    urgent_utilization_max: float = 0.7
    aged_s: float = 36_000.0
    left_share: float = 0.25
    stale_s: float = 5.0
    load_max: float = 1.0
    rise_max: float = 0.1
    pause_min_s: float = 1.0
    pause_max_s: float = 60.0
    time_slice_s: float = 30.0


def choose_releases(facts: ReleaseFacts, now_s: float, settings: ReleaseSettings) -> tuple[Release, ...]:
    """At most two requests an endpoint, a slot and a signal: first for models with urgent requests, then to the least
    utilized endpoint. Endpoints that are stale, in backoff, or whose model has the time slice of none of its slots get
    none.
    """
    endpoints = _endpoints(facts.instances, settings)
    load = {endpoint: utilization_of(instances) for endpoint, instances in endpoints.items()}
    queues = _Queues(facts, settings)
    scheduled = _scheduled_slots(endpoints, queues, now_s, settings)
    taken: Counter[SlotId] = Counter()
    releases: list[Release] = []
    for endpoint in sorted(load, key=lambda e: (not queues.has_urgent(e.model), not scheduled[e], load[e], e)):
        if facts.backoffs.get(endpoint, Backoff()).until_s > now_s:
            continue
        normal = _capacity(load[endpoint], settings) if scheduled[endpoint] else 0
        capacity = max(normal, int(load[endpoint] < settings.urgent_utilization_max))
        slots = scheduled[endpoint] or set(map(_slot, endpoints[endpoint]))
        for number in range(capacity):
            slot = min(slots, key=lambda s: (taken[s], s))
            group = queues.take(endpoint.model, urgent_only=number >= normal) if taken[slot] < capacity else None
            if group is None:
                break
            taken[slot] += 1
            releases.append(Release(endpoint=endpoint, batch=group.batch, tenant=group.tenant, count=1, slot=slot))
    counts = Counter(releases)
    return tuple(replace(release, count=count) for release, count in counts.items())


def choose_backoff(
    facts: ReleaseFacts, refused: frozenset[Endpoint], now_s: float, settings: ReleaseSettings
) -> Mapping[Endpoint, Backoff]:
    """The backoffs after this release. `refused`: endpoints whose nodes refused a deferred request since the last."""
    endpoints = _endpoints(facts.instances, settings)
    return {
        endpoint: _backoff(
            facts.backoffs.get(endpoint, Backoff()),
            utilization=utilization_of(instances),
            overload=endpoint in refused or any(i.load > settings.load_max for i in instances),
            now_s=now_s,
            settings=settings,
        )
        for endpoint, instances in endpoints.items()
    }


def _backoff(
    before: Backoff, *, utilization: float, overload: bool, now_s: float, settings: ReleaseSettings
) -> Backoff:
    rises = utilization - before.utilization > settings.rise_max and utilization > settings.below_two
    if before.until_s > now_s:
        return replace(before, utilization=utilization)
    if overload or rises:
        pause_s = min(max(2 * before.pause_s, settings.pause_min_s), settings.pause_max_s)
        return Backoff(pause_s=pause_s, until_s=now_s + pause_s, utilization=utilization)
    if before.pause_s and now_s >= before.until_s + before.pause_s:
        pause_s = before.pause_s / 2 if before.pause_s > settings.pause_min_s else 0.0
        return Backoff(pause_s=pause_s, until_s=now_s, utilization=utilization)
    return replace(before, utilization=utilization)


def _endpoints(instances: Iterable[InstanceFacts], settings: ReleaseSettings) -> dict[Endpoint, list[InstanceFacts]]:
    """The instances that take deferred requests and reported recently, by endpoint."""
    endpoints: dict[Endpoint, list[InstanceFacts]] = {}
    for instance in instances:
        if is_usable(instance, settings.stale_s) and instance.kind.serves(Tier.NIW):
            endpoints.setdefault(instance.endpoint, []).append(instance)
    return endpoints


def _slot(instance: InstanceFacts) -> SlotId:
    return SlotId(node_id=instance.node_id, number=instance.slot)


def _capacity(utilization: float, settings: ReleaseSettings) -> int:
    if utilization < settings.below_two:
        return 2
    return int(utilization < settings.below_one)


def _scheduled_slots(
    endpoints: Mapping[Endpoint, list[InstanceFacts]], queues: "_Queues", now_s: float, settings: ReleaseSettings
) -> dict[Endpoint, set[SlotId]]:
    """The slots of each endpoint whose time slice no other model has. Only models with waiting requests get time
    slices; whose it is depends on the time alone, so that all dispatchers agree.
    """
    slots: dict[SlotId, set[str]] = {}
    for endpoint, instances in endpoints.items():
        if any(queues.waiting(endpoint.model)):
            for instance in instances:
                slots.setdefault(_slot(instance), set()).add(endpoint.model)
    slice_number = int(now_s / settings.time_slice_s)
    scheduled = {slot: sorted(models)[slice_number % len(models)] for slot, models in slots.items()}
    return {
        endpoint: {slot for slot in map(_slot, instances) if scheduled.get(slot, endpoint.model) == endpoint.model}
        for endpoint, instances in endpoints.items()
    }


class _Queues:
    """What is left to release while one release is decided."""

    def __init__(self, facts: ReleaseFacts, settings: ReleaseSettings) -> None:
        self._settings = settings
        self._last_tenants = dict(facts.last_tenants)
        self._groups: dict[str, list[GroupFacts]] = {}
        for group in sorted(facts.groups, key=lambda group: (group.left_s, group.batch)):
            self._groups.setdefault(group.model, []).append(group)
        self._left = {(group.batch, group.model): group.waiting for group in facts.groups}

    def waiting(self, model: str) -> list[GroupFacts]:
        """The model's groups that still have waiting requests, the nearest deadline first."""
        return [group for group in self._groups.get(model, ()) if self._left[group.batch, model]]

    def has_urgent(self, model: str) -> bool:
        return any(_is_urgent(group, self._settings) for group in self.waiting(model))

    def take(self, model: str, *, urgent_only: bool) -> GroupFacts | None:
        """The group to release the next request of: the urgent ones first, of the tenant next in rotation."""
        waiting = self.waiting(model)
        urgent = [group for group in waiting if _is_urgent(group, self._settings)]
        groups = urgent if urgent or urgent_only else waiting
        if not groups:
            return None
        last = self._last_tenants.get(model, "")
        chosen = min(groups, key=lambda group: (group.tenant <= last, group.tenant))
        self._last_tenants[model] = chosen.tenant
        self._left[chosen.batch, model] -= 1
        return chosen


def _is_urgent(group: GroupFacts, settings: ReleaseSettings) -> bool:
    return group.age_s > settings.aged_s or group.left_s < settings.left_share * (group.age_s + group.left_s)
