"""Requests that wait in a long queue while another instance of their model is idle: which of them move there.

A route is chosen when a request arrives. An instance that becomes ready or idle afterwards serves nothing of what
waits elsewhere; so waiting requests are routed again, as many as keep the idle instance at work until the next look.

A process knows the requests that it has sent and that have no token yet, and how many requests an instance had not
begun when it reported: of a process that has more, the first have begun. It takes the others as spread evenly over the
queue. Those that may begin before they could leave stay; of the rest the first in order move:

    a: a queue of 4 s, 4 not begun, of which this process has sent o, p, q, r and s        b: idle
       before them    o has begun    p 0 s    q 1 s    r 2 s    s 3 s                      q moves to b

Several processes see the same idle instance, and each other's moves only later. So each takes of its places, in the
mean, the share that it has sent of all that waits in long queues, and begins with another instance.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from controlplane.policies.decisions import Reroute, Route
from controlplane.policies.facts import InstanceFacts
from controlplane.policies.routing import is_usable, predicted_wait_s, takes_tokens, utilization_of
from dataplane.protocol.tiers import IW_F, IW_N, Tier

_LOOKED_AT = 8
"""Of a queue's first requests, for one that the instance has not failed and has room for."""


class WaitingRequest(Struct, frozen=True, kw_only=True):
    """An interactive request that has no token yet from the instance that got it at `sent_s`. `cached_tokens`: how many
    of its prompt each instance had likely cached then. `output_tokens_max`: of its answer, as it asks for; 0: what
    there is room for. `excluded`: instances that failed it.
    """

    request_id: str
    instance_id: str
    tier: Tier
    input_tokens: int
    sent_s: float
    output_tokens_max: int = 0
    cached_tokens: Mapping[str, int] = {}
    excluded: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        """Of prompt and answer together, as it asks for."""
        return self.input_tokens + self.output_tokens_max


@dataclass(frozen=True, kw_only=True)
class ReroutingFacts:
    """A model's instances, and the requests of this process that wait there. `avoided`: instances and nodes that keep
    failing. `seed`: another one in each process and at each look.
    """

    instances: tuple[InstanceFacts, ...]
    waiting: tuple[WaitingRequest, ...]
    avoided: frozenset[str] = frozenset()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ReroutingSettings:
    """Requests leave an instance that has over `wait_min_s` of prefills before a new one, and does not drain: it would
    not take them back. Of these requests one moves if it has over `margin_s` before it by now, and over `hit_weight`
    times the time that it takes to compute again what is cached where it waits: a cached token counts for as many of a
    queue's, as in routing. An instance whose memory is used to less than `utilization_max` takes so many that it has
    `fill_s` of prefills; the rest of it is for those that arrive. Instances in pools neither give nor take: other
    models wait for their slots, too. Reports older than `stale_s` do not count.
    """

    wait_min_s: float = 1.0
    margin_s: float = 0.5
    fill_s: float = 0.1
    utilization_max: float = 0.5
    hit_weight: float = 8.0
    stale_s: float = 5.0


def may_reroute(instances: Iterable[InstanceFacts], settings: ReroutingSettings) -> bool:
    """Whether one has a long queue while another one is idle. Without both nothing moves."""
    waits_s = [_wait_s(one) for one in instances if _counts(one, settings)]
    return len(waits_s) > 1 and max(waits_s) > settings.wait_min_s and min(waits_s) < settings.fill_s


def choose_reroutes(facts: ReroutingFacts, now_s: float, settings: ReroutingSettings) -> tuple[Reroute, ...]:
    """The requests that move, and to which instances. The longest queue gives first."""
    queues, share = _queues(facts, settings)
    reroutes: list[Reroute] = []
    for target in sorted(facts.instances, key=lambda one: _drawn(facts.seed, one.instance_id)):
        room_s, places = _room(target, facts, settings)
        giving = [queue for queue in queues if room_s > 0 and queue.wait_s > settings.wait_min_s]
        while giving and room_s > 0 and places > 0:
            queue = max(giving, key=lambda one: one.wait_s)
            request = queue.first_for(target) if queue.wait_s > settings.wait_min_s else None
            if request is None:
                giving.remove(queue)
                continue
            room_s, places = room_s - queue.takes_s(request), places - 1
            ours = _drawn(facts.seed, f"{target.instance_id} {places}") < share
            if ours:  # or another process fills this place
                queue.take(request)
                reroutes.append(Reroute(request_id=request.request_id, route=_route_to(target, request)))
    return tuple(reroutes)


class _Queue:
    """The requests of this process that an instance has not begun, in the order of service. `wait_s`: how long its
    queue is, of `queued` requests.
    """

    def __init__(
        self, source: InstanceFacts, mine: Sequence[WaitingRequest], queued: int, settings: ReroutingSettings
    ) -> None:
        self.wait_s = _wait_s(source)
        self._source_tokens = source.context_tokens
        self._token_s = self.wait_s * len(mine) / queued / max(1, sum(one.input_tokens for one in mine))
        self._anywhere: list[WaitingRequest] = []
        self._to: defaultdict[str, list[WaitingRequest]] = defaultdict(list)
        """Those that move only where some of their prompt is cached, by instance."""
        for number, request in enumerate(mine):
            ahead = (number + 1) * (queued + 1) / (len(mine) + 1) - 1  # the mean of its places among all
            before_s = self.wait_s * ahead / queued - source.age_s
            if before_s > settings.margin_s:
                affordable_tokens = before_s / settings.hit_weight / self._token_s
                self._sort_in(request, request.cached_tokens.get(source.instance_id, 0) - affordable_tokens)

    def takes_s(self, request: WaitingRequest) -> float:
        """How much of the queue a request is, by its prompt."""
        return request.input_tokens * self._token_s

    def first_for(self, target: InstanceFacts) -> WaitingRequest | None:
        """The first request that may go to an instance."""
        name = target.instance_id
        takes_all = self._source_tokens is not None and takes_tokens(target, self._source_tokens)
        able = [
            one
            for some in (self._anywhere, self._to[name])
            for one in some[:_LOOKED_AT]
            if name not in one.excluded and (takes_all or takes_tokens(target, one.tokens))
        ]
        return min(able, key=_order, default=None)

    def take(self, request: WaitingRequest) -> None:
        """A request leaves."""
        self.wait_s -= self.takes_s(request)
        for some in (self._anywhere, *self._to.values()):
            if request in some:
                some.remove(request)

    def _sort_in(self, request: WaitingRequest, needed_tokens: float) -> None:
        """`needed_tokens`: of its prompt, that an instance must have cached to take it."""
        if needed_tokens <= 0:
            self._anywhere.append(request)
        else:
            for name, tokens in request.cached_tokens.items():
                if tokens >= needed_tokens:
                    self._to[name].append(request)


def _order(request: WaitingRequest) -> tuple[bool, float, str]:
    """The order of service."""
    return request.tier is not IW_F, request.sent_s, request.request_id


def _queues(facts: ReroutingFacts, settings: ReroutingSettings) -> tuple[list[_Queue], float]:
    """The long queues with requests of this process, and its share of all that waits in long ones."""
    mine: defaultdict[str, list[WaitingRequest]] = defaultdict(list)
    for request in sorted(facts.waiting, key=_order):
        mine[request.instance_id].append(request)
    queues: list[_Queue] = []
    ours = total = 0
    for source in sorted(facts.instances, key=lambda one: one.instance_id):
        queued = source.waiting + source.sent_requests
        if _counts(source, settings) and source.accepting and _wait_s(source) > settings.wait_min_s and queued:
            own = mine[source.instance_id][-queued:]
            ours, total = ours + len(own), total + queued
            if own:
                queues.append(_Queue(source, own, queued, settings))
    return queues, ours / max(1, total)


def _drawn(seed: int, name: str) -> float:
    """A number from 0 to 1, for each seed and name another one."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") / 2**64


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
    places = len(facts.waiting)
    if target.batch_max is not None:
        places = target.batch_max - target.requests - target.sent_requests
    return settings.fill_s - _wait_s(target), places
