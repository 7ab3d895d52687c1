"""Requests that wait in a long queue while another instance of their model is idle: which of them move there.

A route is chosen when a request arrives. An instance that becomes ready or idle afterwards serves nothing of what
waits elsewhere; so waiting requests are routed again, as many as keep the idle instance at work until the next look.

A process knows the requests that it has sent and that have no token yet, but not how many others have sent. It takes
its own as spread evenly over the queue. Those with at most `wait_min_s` before them stay, since they may have begun by
the time they could leave; of the others the first in order move:

    a: a queue of 4 s, of which this process has sent p, q, r and s        b: idle
       before them     p 0 s    q 1 s    r 2 s    s 3 s                    r moves to b
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from controlplane.policies.decisions import Reroute, Route
from controlplane.policies.facts import InstanceFacts
from controlplane.policies.routing import is_usable, predicted_wait_s, utilization_of
from dataplane.protocol.tiers import IW_F, IW_N, Tier


class WaitingRequest(Struct, frozen=True, kw_only=True):
    """An interactive request that has no token yet from the instance that got it at `sent_s`. `cached_tokens`: how many
    of its prompt each instance had likely cached then.
    """

    request_id: str
    instance_id: str
    tier: Tier
    input_tokens: int
    sent_s: float
    cached_tokens: Mapping[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class ReroutingFacts:
    """A model's instances, and the requests of this process that wait there. `avoided`: instances and nodes that keep
    failing.
    """

    instances: tuple[InstanceFacts, ...]
    waiting: tuple[WaitingRequest, ...]
    avoided: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ReroutingSettings:
    """A request moves if it has over `wait_min_s` of prefills before it and loses less than `stay_share` of its prompt
    that is cached where it waits. An instance whose memory is used to less than `utilization_max` takes so many that it
    has `fill_s` of prefills; the rest of it is for those that arrive. Instances in pools neither give nor take: other
    models wait for their slots, too. Reports older than `stale_s` do not count.
    """

    wait_min_s: float = 1.0
    fill_s: float = 0.3
    utilization_max: float = 0.5
    stay_share: float = 0.5
    stale_s: float = 5.0


def may_reroute(instances: Iterable[InstanceFacts], settings: ReroutingSettings) -> bool:
    """Whether one has a long queue while another one is idle. Without both nothing moves."""
    waits_s = [_wait_s(one) for one in instances if _counts(one, settings)]
    return len(waits_s) > 1 and max(waits_s) > settings.wait_min_s and min(waits_s) < settings.fill_s


def choose_reroutes(facts: ReroutingFacts, now_s: float, settings: ReroutingSettings) -> tuple[Reroute, ...]:
    """The requests that move, and to which instances. The longest queue gives first."""
    waits_s = {one.instance_id: _wait_s(one) for one in facts.instances if _counts(one, settings)}
    queues = _queues(facts, waits_s, settings)
    reroutes: list[Reroute] = []
    for target in sorted(facts.instances, key=lambda one: one.instance_id):
        room_s, places = _room(target, facts, settings)
        while room_s > 0 and places > 0:
            request = _next_of(queues, waits_s, target, settings)
            if request is None:
                break
            queues[request.instance_id].remove(request)
            takes_s = request.input_tokens * (target.prefill_token_s or 0.0)
            waits_s[request.instance_id] -= takes_s
            room_s, places = room_s - takes_s, places - 1
            reroutes.append(Reroute(request_id=request.request_id, route=_route_to(target, request)))
    return tuple(reroutes)


def _next_of(
    queues: Mapping[str, Sequence[WaitingRequest]],
    waits_s: Mapping[str, float],
    target: InstanceFacts,
    settings: ReroutingSettings,
) -> WaitingRequest | None:
    """The first request of the longest queue that loses little by moving to an instance."""
    for source in sorted(queues, key=lambda name: (-waits_s[name], name)):
        if waits_s[source] <= settings.wait_min_s:
            return None
        for request in queues[source]:
            cached = request.cached_tokens
            lost_tokens = cached.get(source, 0) - cached.get(target.instance_id, 0)
            if lost_tokens < settings.stay_share * request.input_tokens:
                return request
    return None


def _route_to(target: InstanceFacts, request: WaitingRequest) -> Route:
    return Route(
        instance_id=target.instance_id,
        node_id=target.node_id,
        region=target.endpoint.region,
        utilization=utilization_of([target]),
        cached_tokens=request.cached_tokens.get(target.instance_id, 0),
    )


def _wait_s(instance: InstanceFacts) -> float:
    """Seconds until a request of either interactive tier would begin; 0 where no node has reported it."""
    return predicted_wait_s(instance, IW_N) or 0.0


def _counts(instance: InstanceFacts, settings: ReroutingSettings) -> bool:
    return instance.age_s <= settings.stale_s and not instance.pooled


def _room(target: InstanceFacts, facts: ReroutingFacts, settings: ReroutingSettings) -> tuple[float, int]:
    """Seconds of prefills that an instance may take now, and how many requests."""
    avoided = target.instance_id in facts.avoided or target.node_id in facts.avoided
    usable = is_usable(target, settings.stale_s) and not target.pooled and target.kind.serves(IW_N) and not avoided
    if not usable or target.prefill_wait_s is None or utilization_of([target]) >= settings.utilization_max:
        return 0.0, 0
    begun = target.requests + target.sent_requests
    return settings.fill_s - _wait_s(target), len(
        facts.waiting
    ) if target.batch_max is None else target.batch_max - begun


def _queues(
    facts: ReroutingFacts, waits_s: Mapping[str, float], settings: ReroutingSettings
) -> dict[str, list[WaitingRequest]]:
    """The requests that may leave each instance, in the order of service."""
    mine: dict[str, list[WaitingRequest]] = {}
    for request in sorted(facts.waiting, key=lambda one: (one.tier is not IW_F, one.sent_s, one.request_id)):
        if waits_s.get(request.instance_id, 0.0) > settings.wait_min_s:
            mine.setdefault(request.instance_id, []).append(request)
    leaving: dict[str, list[WaitingRequest]] = {}
    for name, queue in mine.items():
        for number, request in enumerate(queue):
            before_s = waits_s[name] * number / len(queue)
            if before_s > settings.wait_min_s:
                leaving.setdefault(name, []).append(request)
    return leaving
