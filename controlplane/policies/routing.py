"""The route of a request: a region by preference and effective memory utilization, then the instance with the fewest
remaining tokens (SageServe 6.1, 6.2). Views are about a second old, so what was sent since counts as well.

A cached prefix is prefill work that nobody need do again, and without it everybody behind the request would wait
longer. So a cached token counts for as many of the queue's as an instance has requests, and for eight at least. But an
instance with more requests than the others gets none for what it has cached: the only one that has a prompt, up to
twice the mean of them (of two instances, half as much again: twice the mean is all there are), so that it moves only
where that helps; those that share one, up to the mean, so that a beginning of many prompts becomes no hot spot but
spreads:

    instance   requests   remaining + sent   cached       score
    a                 9             38,000    3,000       5,000   <- chosen: a token counts for the mean, 11
    b                 3              6,000        0       6,000
    c                21             10,000    3,000      10,000   (two have it, 21 is over 11 + 4: no hit counts)

All of that is among the instances, in all regions, that would make the first token well in time: the prompts before it
and its own, less what is cached, take at most half of its objective. If there are none, among those that would make it
in time; if there are none either, among all. Instances that have cached half of the prompt stay among them, late or
not: where nobody keeps up, work that is not done again helps everybody. Where a region has instances of the model with
GPUs of their own and others that share their slots, the latter are its reserve: it comes between the first two.

Several processes have the same reports and hear of each other's requests later, or not at all without Redis. So that
not all of them send to the one that seems emptiest until they do, each takes the shorter of two queues that are drawn
for each request (the power of two choices), beside the instances whose cache is worth something.

Requests and instances are judged one by one: one overloaded instance does not switch the cache off for others.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import InstanceFacts, RoutingFacts
from dataplane.protocol.tiers import IW_F, InstanceKind, Tier

_MIXED = InstanceKind.MIXED


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """Regions below `utilization_max` are preferred to regions above it; reports older than `stale_s` do not count.

    A region with an instance that has cached at least `return_share` of the prompt precedes the preferred ones. A
    cached token counts as fewer in the queue: as the mean requests of an instance, at least `hit_weight`. It does so on
    instances with at most `hit_load_max` times the mean requests (of two instances, 1.5), `shared_load_max` times where
    another one has cached `shared_share` of as much too, and `hit_requests` more. The home instance of a conversation
    counts as if it had cached `home_share` of the prompt: another process may have sent the turns before this one
    there. `switch_s`: about what a slot that models share takes to change its model. `timely_share`: of the objective
    for the first token, within which it is well in time.
    """

    utilization_max: float = 0.7
    stale_s: float = 5.0
    return_share: float = 0.5
    hit_weight: float = 8.0
    hit_load_max: float = 2.0
    shared_load_max: float = 1.0
    shared_share: float = 0.5
    hit_requests: float = 4.0
    home_share: float = 0.3
    switch_s: float = 0.3
    timely_share: float = 0.5


def is_usable(instance: InstanceFacts, stale_s: float) -> bool:
    """Whether an instance accepts requests and has reported recently."""
    return instance.accepting and instance.age_s <= stale_s


def utilization_of(instances: Iterable[InstanceFacts]) -> float:
    """Effective memory utilization of an endpoint: KV used over KV capacity of its instances (SageServe 6.1). Tokens
    sent and not yet reported count as used. 1 without capacity.
    """
    used_bytes = capacity_bytes = 0
    for instance in instances:
        used_bytes += instance.kv_used_bytes + instance.sent_tokens * instance.kv_bytes_per_token
        capacity_bytes += instance.kv_capacity_bytes
    return used_bytes / capacity_bytes if capacity_bytes else 1.0


def predicted_wait_s(instance: InstanceFacts, tier: Tier) -> float | None:
    """Seconds until an instance begins a request that is sent now: the prefills before it, and what was sent to it
    since its report. None: its node has not reported it. The prompt's own prefill, which load does not change, is
    excluded.
    """
    wait_s = instance.prefill_urgent_wait_s if tier is IW_F else instance.prefill_wait_s
    if wait_s is None or instance.prefill_token_s is None:
        return None
    return wait_s + instance.sent_input_tokens * instance.prefill_token_s


def _in_time(instances: list[InstanceFacts], facts: RoutingFacts, settings: RoutingSettings) -> list[InstanceFacts]:
    """The instances that would make the first token well in time, else those that would make it in time. Waits are
    about what was reported a second ago, so who is well in time goes first. Reserves come between the two, see above.
    Those that have cached enough of the prompt stay beside them: whether they have too much to do, the queues decide.
    If nobody would: all, but where there is a reserve the one that begins first.
    """
    if len(instances) == 1:
        return instances
    own, shared = instances, []
    if _has_reserve(instances):
        own, shared = [one for one in instances if not one.pooled], [one for one in instances if one.pooled]
    if facts.ttft_s is None:
        return own or instances
    least = max(1.0, settings.return_share * facts.input_tokens)
    for some, share in ((own, settings.timely_share), (shared, 1.0), (own, 1.0)):
        timely = {one.instance_id for one in some if _makes(one, facts, share * facts.ttft_s)}
        if timely:
            cached = facts.cached_tokens
            return [one for one in some if one.instance_id in timely or cached.get(one.instance_id, 0) >= least]
    if not shared:
        return instances
    return [min(instances, key=lambda one: (predicted_wait_s(one, facts.tier) or 0.0, one.pooled, one.instance_id))]


def _has_reserve(instances: Iterable[InstanceFacts]) -> bool:
    """Whether in some region pooled instances stand beside others. Those of a pool are alone in their region."""
    pooled = {one.endpoint.region for one in instances if one.pooled}
    return bool(pooled) and any(not one.pooled and one.endpoint.region in pooled for one in instances)


def _makes(instance: InstanceFacts, facts: RoutingFacts, ttft_s: float) -> bool:
    """Whether a first token would be made in time, as far as is known: with the prompts before it and its own, and with
    room for a sequence more. Of a prompt that takes longer by itself: whether it begins at once.
    """
    if instance.batch_max is not None and instance.requests + instance.sent_requests >= instance.batch_max:
        return False
    wait_s = predicted_wait_s(instance, facts.tier)
    tokens = facts.input_tokens - facts.cached_tokens.get(instance.instance_id, 0)
    own_s = tokens * (instance.prefill_token_s or 0.0)
    return wait_s is None or wait_s <= max(0.0, ttft_s - own_s)


def takers(facts: RoutingFacts, stale_s: float) -> list[InstanceFacts]:
    """Instances that may take the request: of those with room for prompt and answer, those that are not avoided or, if
    there are none, all. Where none in the region that it was released to has room, those of other regions do; where
    none has at all, any may refuse it.
    """
    model, tier, excluded, avoided = facts.model, facts.tier, facts.excluded, facts.avoided
    usable = [
        instance
        for instance in facts.instances
        if instance.endpoint.model == model
        and (instance.kind is _MIXED or instance.kind.serves(tier))
        and instance.instance_id not in excluded
        and is_usable(instance, stale_s)
    ]
    there = usable
    if facts.only_region is not None:
        there = [instance for instance in usable if instance.endpoint.region == facts.only_region]
    if there:
        tokens = facts.tokens
        roomy = [instance for instance in there if takes_tokens(instance, tokens)]
        there = roomy or [instance for instance in usable if takes_tokens(instance, tokens)] or there
    if not avoided:
        return there
    return [i for i in there if i.instance_id not in avoided and i.node_id not in avoided] or there


def takes_tokens(instance: InstanceFacts, tokens: int) -> bool:
    """Whether an instance takes so many tokens of prompt and answer together, as far as is known."""
    return instance.context_tokens is None or tokens <= instance.context_tokens


def choose_route(facts: RoutingFacts, now_s: float, settings: RoutingSettings) -> Route | NoRoute:
    """The first preferred region below the threshold, else the least utilized one; there, join the shortest queue.
    Instances that keep failing or would begin too late are chosen only if there are no others.
    """
    candidates = takers(facts, settings.stale_s)
    if not candidates:
        return NoRoute(reason=_why_none(facts, settings))
    by_region: dict[str, list[InstanceFacts]] = {}
    for instance in _in_time(candidates, facts, settings):
        by_region.setdefault(instance.endpoint.region, []).append(instance)
    region, utilization = _choose_region(by_region, _order(by_region, facts, settings), settings.utilization_max)
    if facts.only_region not in (None, region) and utilization >= settings.utilization_max:
        return NoRoute(
            reason=f"no instance of '{facts.model}' in the region '{facts.only_region}' takes {facts.tokens} tokens,"
            " and those of other regions are busy",
            waits=True,
        )
    there = by_region[region]
    chosen = (
        _fewest_switches(there, facts.tier, settings) if there[0].pooled else _shortest_queue(there, facts, settings)
    )
    return Route(
        instance_id=chosen.instance_id,
        node_id=chosen.node_id,
        region=region,
        utilization=utilization,
        cached_tokens=facts.cached_tokens.get(chosen.instance_id, 0),
    )


def _order(
    by_region: Mapping[str, Iterable[InstanceFacts]], facts: RoutingFacts, settings: RoutingSettings
) -> tuple[str, ...]:
    """The regions in order of preference. Those that have cached enough of the prompt are first: a conversation returns
    to its region.
    """
    cached = facts.cached_tokens
    if not cached:
        return facts.preference
    least = settings.return_share * facts.input_tokens
    returns = {
        region: any(cached.get(one.instance_id, 0) >= least for one in instances)
        for region, instances in by_region.items()
    }
    others = sorted(returns.keys() - set(facts.preference))
    return tuple(sorted((*facts.preference, *others), key=lambda region: not returns.get(region, False)))


def _choose_region(
    by_region: Mapping[str, Iterable[InstanceFacts]], preference: tuple[str, ...], utilization_max: float
) -> tuple[str, float]:
    """A region and its utilization. Regions outside of the preference are last, by name."""
    load: dict[str, float] = {}
    for region in preference:
        if region in by_region:
            load[region] = utilization = utilization_of(by_region[region])
            if utilization < utilization_max:
                return region, utilization
    for region in sorted(by_region.keys() - load.keys()):
        load[region] = utilization = utilization_of(by_region[region])
        if utilization < utilization_max:
            return region, utilization
    region = min(load, key=load.__getitem__)
    return region, load[region]


def _shortest_queue(
    instances: Sequence[InstanceFacts], facts: RoutingFacts, settings: RoutingSettings
) -> InstanceFacts:
    """Of the instances that are considered, the one with the fewest remaining tokens, less what its cache is worth; of
    several the home instance, else the first by id.
    """
    if len(instances) == 1:
        return instances[0]
    home = home_instance(facts.home_key, instances) if facts.home_key else ""
    worth = _worth_of_hits(instances, facts, home, settings) if home or facts.cached_tokens else {}
    considered = _considered(instances, facts.draw, worth)
    chosen, fewest = considered[0], math.inf
    for instance in considered:
        tokens: float = instance.remaining_tokens + instance.sent_tokens
        if worth:
            tokens -= worth.get(instance.instance_id, 0.0)
        if tokens < fewest or (tokens == fewest and _precedes(instance.instance_id, chosen.instance_id, home)):
            chosen, fewest = instance, tokens
    return chosen


def _considered(
    instances: Sequence[InstanceFacts], draw: int | None, worth: Mapping[str, float]
) -> Sequence[InstanceFacts]:
    """Two instances by a random number, and those whose cache is worth something; all without a number."""
    count = len(instances)
    if draw is None or count <= 2:
        return instances
    first, second = draw % count, draw // count % (count - 1)
    two = first, second + (second >= first)
    return [one for place, one in enumerate(instances) if place in two or worth.get(one.instance_id, 0.0) > 0]


def _fewest_switches(instances: Sequence[InstanceFacts], tier: Tier, settings: RoutingSettings) -> InstanceFacts:
    """Of slots that models share and that keep up, the one that begins first, where one that works for the model
    already begins `switch_s` sooner than it says; of several the emptiest.
    """

    def rank(one: InstanceFacts) -> tuple[bool, float, float, str]:
        works = one.remaining_tokens + one.sent_tokens > 0
        wait_s = (predicted_wait_s(one, tier) or 0.0) - works * settings.switch_s
        return one.load > 1, wait_s, one.kv_used_bytes / max(1, one.kv_capacity_bytes), one.instance_id

    return min(instances, key=rank)


def _precedes(name: str, other: str, home: str) -> bool:
    """Whether an instance goes before another one with as many tokens."""
    return name == home or (other != home and name < other)


def _worth_of_hits(
    instances: Sequence[InstanceFacts], facts: RoutingFacts, home: str, settings: RoutingSettings
) -> dict[str, float]:
    """By instance: for how many tokens of its queue its cache makes up. Nothing on an instance with more requests than
    the others.
    """
    requests = {one.instance_id: one.requests + one.sent_requests for one in instances}
    mean = sum(requests.values()) / len(requests)
    cached: dict[str, float] = {name: facts.cached_tokens.get(name, 0) for name in requests}
    alike = settings.shared_share * max(cached.values())
    shared = alike > 0 and sum(tokens >= alike for tokens in cached.values()) > 1
    alone_max = min(settings.hit_load_max, (1 + len(requests)) / 2)  # midway to all of the requests
    most = (settings.shared_load_max if shared else alone_max) * mean + settings.hit_requests
    if home:
        cached[home] = max(cached[home], settings.home_share * facts.input_tokens)
    weight = max(settings.hit_weight, mean)
    return {name: weight * cached[name] for name, count in requests.items() if count <= most}


def home_instance(key: bytes, instances: Iterable[InstanceFacts]) -> str:
    """The instance with the highest hash of key and id (rendezvous hashing): where instances come and go, other
    conversations keep theirs.
    """
    keyed = hashlib.blake2b(key, digest_size=8)

    def weight(name: str) -> bytes:
        hashed = keyed.copy()
        hashed.update(name.encode())
        return hashed.digest()

    return max((instance.instance_id for instance in instances), key=weight)


def choose_preference(
    regions: Sequence[str], origin: str | None, latencies_ms: Mapping[tuple[str, str], float]
) -> tuple[str, ...]:
    """The regions as a request from `origin` prefers them: its own, then by latency (milliseconds, by origin and
    destination). Regions of equal latency, and those of unknown latency, which are last, keep their order.
    """

    def latency_ms(region: str) -> float:
        return -1.0 if region == origin else latencies_ms.get((origin or "", region), math.inf)

    return tuple(sorted(regions, key=latency_ms))


def _why_none(facts: RoutingFacts, settings: RoutingSettings) -> str:
    only = facts.only_region
    of_model = [
        instance
        for instance in facts.instances
        if instance.endpoint.model == facts.model and only in (None, instance.endpoint.region)
    ]
    if not of_model:
        where = "any region" if only is None else f"the region '{only}'"
        return f"no instance of '{facts.model}' is placed in {where}"
    if not any(instance.kind.serves(facts.tier) for instance in of_model):
        return f"no instance of '{facts.model}' is for requests of tier {facts.tier.value}"
    if all(instance.instance_id in facts.excluded for instance in of_model):
        return f"every instance of '{facts.model}' has just failed this request"
    if all(instance.age_s > settings.stale_s for instance in of_model):
        return f"no node with '{facts.model}' has reported in the last {settings.stale_s:g} s"
    return f"no instance of '{facts.model}' is ready yet"
