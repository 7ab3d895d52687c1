"""How many deferred requests (NIW) go where, when endpoints signal room (SageServe 6.2)."""

from dataclasses import dataclass

from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, InstanceFacts, QueueFacts, ReleaseFacts, Tier
from controlplane.policies.routing import is_usable, utilization_of


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """An endpoint below `below_one` takes one request a signal, below `below_two` two.
    Requests that waited long count as interactive: they are let go up to `aged_utilization_max`.
    """

    below_one: float = 0.6
    below_two: float = 0.5
    aged_utilization_max: float = 0.7
    stale_s: float = 5.0


def choose_releases(facts: ReleaseFacts, now_s: float, settings: ReleaseSettings) -> tuple[Release, ...]:
    """At most two requests an endpoint and signal, the emptiest endpoint first. Endpoints that no fresh report
    vouches for get none.
    """
    endpoints: dict[Endpoint, list[InstanceFacts]] = {}
    for instance in facts.instances:
        if is_usable(instance, settings.stale_s) and instance.kind.serves(Tier.NIW):
            endpoints.setdefault(instance.endpoint, []).append(instance)
    load = {endpoint: utilization_of(instances) for endpoint, instances in endpoints.items()}
    left = {queue.model: queue for queue in facts.queues}
    releases: list[Release] = []
    for endpoint in sorted(load, key=lambda e: (load[e], e)):
        queue = left.get(endpoint.model)
        if queue is None:
            continue
        count = min(_room(load[endpoint], queue, settings), queue.waiting)
        if count:
            releases.append(Release(endpoint=endpoint, count=count))
            left[endpoint.model] = QueueFacts(
                model=queue.model, waiting=queue.waiting - count, aged=max(0, queue.aged - count)
            )
    return tuple(releases)


def _room(utilization: float, queue: QueueFacts, settings: ReleaseSettings) -> int:
    if utilization < settings.below_two:
        return 2
    if utilization < settings.below_one:
        return 1
    return int(queue.aged > 0 and utilization < settings.aged_utilization_max)
