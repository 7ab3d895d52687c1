"""How many deferred requests (NIW) go where, when endpoints signal room (SageServe 6.2), and whose they are.

Room first: releases follow fresh reports alone, and an endpoint that shows a sign of trouble gets nothing for a while,
longer each time. Models that share a slot share its room. Then order: urgent requests (old, or near their deadline)
before others, tenants in turn, and of a tenant the nearest deadline.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controlplane.policies.decisions import Release
from controlplane.policies.facts import Backoff, Endpoint, InstanceFacts, LotFacts, ReleaseFacts, SlotId
from controlplane.policies.routing import is_usable, utilization_of
from dataplane.protocol.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """An endpoint below `below_one` takes one request a signal, below `below_two` two. Urgent requests, older than
    `aged_s` or with less than `left_share` of their window left, count as interactive: they are let go up to
    `urgent_utilization_max`.

    Trouble is a node's load above `load_max`, a refusal, or a rise of utilization by more than `rise_max` between two
    looks to above `below_two`. It pauses an endpoint for `pause_min_s`, doubled each time up to `pause_max_s`, and
    halved for each such time that was quiet.
    Models that share a slot take NIW in turns of `turn_s`.
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
    turn_s: float = 30.0


def choose_releases(facts: ReleaseFacts, now_s: float, settings: ReleaseSettings) -> tuple[Release, ...]:
    """At most two requests an endpoint, a slot and a signal: first where something urgent waits, then the emptiest
    endpoint. Endpoints that no fresh report vouches for, that pause, or whose model has not the turn on its slots, get
    none.
    """
    endpoints = _endpoints(facts.instances, settings)
    load = {endpoint: utilization_of(instances) for endpoint, instances in endpoints.items()}
    queues = _Queues(facts, settings)
    in_turn = _in_turn(endpoints, queues, now_s, settings)
    taken: Counter[SlotId] = Counter()
    releases: list[Release] = []
    for endpoint in sorted(load, key=lambda e: (not queues.hurries(e.model), not in_turn[e], load[e], e)):
        if facts.backoffs.get(endpoint, Backoff()).until_s > now_s:
            continue
        normal = _room(load[endpoint], settings) if in_turn[endpoint] else 0
        room = max(normal, int(load[endpoint] < settings.urgent_utilization_max))
        slots = in_turn[endpoint] or set(map(_slot, endpoints[endpoint]))
        for place in range(room):
            slot = min(slots, key=lambda s: (taken[s], s))
            lot = queues.take(endpoint.model, urgent_only=place >= normal) if taken[slot] < room else None
            if lot is None:
                break
            taken[slot] += 1
            releases.append(Release(endpoint=endpoint, batch=lot.batch, tenant=lot.tenant, count=1, slot=slot))
    return _merged(releases)


def choose_backoff(
    facts: ReleaseFacts, refused: frozenset[Endpoint], now_s: float, settings: ReleaseSettings
) -> Mapping[Endpoint, Backoff]:
    """What pauses after this look. `refused`: endpoints whose nodes refused a deferred request since the last one."""
    endpoints = _endpoints(facts.instances, settings)
    return {
        endpoint: _backoff(
            facts.backoffs.get(endpoint, Backoff()),
            utilization=utilization_of(instances),
            trouble=endpoint in refused or any(i.load > settings.load_max for i in instances),
            now_s=now_s,
            settings=settings,
        )
        for endpoint, instances in endpoints.items()
    }


def _backoff(before: Backoff, *, utilization: float, trouble: bool, now_s: float, settings: ReleaseSettings) -> Backoff:
    rises = utilization - before.utilization > settings.rise_max and utilization > settings.below_two
    if before.until_s > now_s:
        return replace(before, utilization=utilization)
    if trouble or rises:
        pause_s = min(max(2 * before.pause_s, settings.pause_min_s), settings.pause_max_s)
        return Backoff(pause_s=pause_s, until_s=now_s + pause_s, utilization=utilization)
    if before.pause_s and now_s >= before.until_s + before.pause_s:
        pause_s = before.pause_s / 2 if before.pause_s > settings.pause_min_s else 0.0
        return Backoff(pause_s=pause_s, until_s=now_s, utilization=utilization)
    return replace(before, utilization=utilization)


def _endpoints(instances: Iterable[InstanceFacts], settings: ReleaseSettings) -> dict[Endpoint, list[InstanceFacts]]:
    """The instances that take deferred requests and were heard of lately, by endpoint."""
    endpoints: dict[Endpoint, list[InstanceFacts]] = {}
    for instance in instances:
        if is_usable(instance, settings.stale_s) and instance.kind.serves(Tier.NIW):
            endpoints.setdefault(instance.endpoint, []).append(instance)
    return endpoints


def _slot(instance: InstanceFacts) -> SlotId:
    return SlotId(node_id=instance.node_id, number=instance.slot)


def _room(utilization: float, settings: ReleaseSettings) -> int:
    if utilization < settings.below_two:
        return 2
    return int(utilization < settings.below_one)


def _in_turn(
    endpoints: Mapping[Endpoint, list[InstanceFacts]], queues: "_Queues", now_s: float, settings: ReleaseSettings
) -> dict[Endpoint, set[SlotId]]:
    """The slots of each endpoint where no other model has the turn. Only models with something waiting take turns; who
    has it follows from the time alone, so that all dispatchers agree.
    """
    slots: dict[SlotId, set[str]] = {}
    for endpoint, instances in endpoints.items():
        if queues.waits(endpoint.model):
            for instance in instances:
                slots.setdefault(_slot(instance), set()).add(endpoint.model)
    turn = int(now_s / settings.turn_s)
    favoured = {slot: sorted(models)[turn % len(models)] for slot, models in slots.items()}
    return {
        endpoint: {slot for slot in map(_slot, instances) if favoured.get(slot, endpoint.model) == endpoint.model}
        for endpoint, instances in endpoints.items()
    }


class _Queues:
    """What is left to let go while a look is decided."""

    def __init__(self, facts: ReleaseFacts, settings: ReleaseSettings) -> None:
        self._turns = dict(facts.turns)
        self._lots: dict[str, list[LotFacts]] = {}
        for lot in sorted(facts.lots, key=lambda lot: (lot.left_s, lot.batch)):
            self._lots.setdefault(lot.model, []).append(lot)
        self._left = {(lot.batch, lot.model): lot.waiting for lot in facts.lots}
        self._urgent = {(lot.batch, lot.model) for lot in facts.lots if _is_urgent(lot, settings)}

    def waits(self, model: str) -> bool:
        """Whether something of the model waits."""
        return any(self._left[lot.batch, model] for lot in self._lots.get(model, ()))

    def hurries(self, model: str) -> bool:
        """Whether something urgent of the model waits."""
        lots = [(lot.batch, model) for lot in self._lots.get(model, ())]
        return any(lot in self._urgent and self._left[lot] for lot in lots)

    def take(self, model: str, *, urgent_only: bool) -> LotFacts | None:
        """The lot to take the next request from."""
        waiting = [lot for lot in self._lots.get(model, ()) if self._left[lot.batch, model]]
        urgent = [lot for lot in waiting if (lot.batch, model) in self._urgent]
        lots = urgent if urgent or urgent_only else waiting
        if not lots:
            return None
        last = self._turns.get(model, "")
        tenant = min({lot.tenant for lot in lots}, key=lambda name: (name <= last, name))
        chosen = next(lot for lot in lots if lot.tenant == tenant)
        self._turns[model] = tenant
        self._left[chosen.batch, model] -= 1
        return chosen


def _is_urgent(lot: LotFacts, settings: ReleaseSettings) -> bool:
    return lot.age_s > settings.aged_s or lot.left_s < settings.left_share * (lot.age_s + lot.left_s)


def _merged(releases: list[Release]) -> tuple[Release, ...]:
    """Releases of one batch to one endpoint, of one slot's room, as one."""
    counts = Counter(releases)
    return tuple(replace(release, count=count) for release, count in counts.items())
