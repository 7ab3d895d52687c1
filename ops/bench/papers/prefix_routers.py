"""Rivals of the live routing policy, as simple as they are elsewhere. They see what the policy sees."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import InstanceFacts, RoutingFacts
from controlplane.policies.routing import RoutingSettings, choose_route, home_instance, takers
from ops.simulator.world.routing import PolicyRouter, Router


class LeastLoaded(PolicyRouter):
    """The live policy without knowledge of prefixes: the fewest remaining tokens."""

    def choose(self, facts: RoutingFacts, now_s: float, settings: RoutingSettings) -> Route | NoRoute:
        return choose_route(replace(facts, cached_tokens={}, home_key=b""), now_s, settings)


class Rival(ABC):
    """A router that counts the requests in flight on each instance, and chooses among all that take requests."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()

    def choose(self, facts: RoutingFacts, now_s: float, settings: RoutingSettings) -> Route | NoRoute:
        instances = takers(facts, settings.stale_s)
        if not instances:
            return NoRoute(reason="no instance takes requests")
        chosen = self.pick(facts, instances)
        self.running[chosen.instance_id] += 1
        return Route(
            instance_id=chosen.instance_id,
            node_id=chosen.node_id,
            region=chosen.endpoint.region,
            utilization=0.0,
            cached_tokens=facts.cached_tokens.get(chosen.instance_id, 0),
        )

    def ended(self, instance_id: str) -> None:
        self.running[instance_id] -= 1

    @abstractmethod
    def pick(self, facts: RoutingFacts, instances: list[InstanceFacts]) -> InstanceFacts:
        """The instance of a request."""

    def fewest_requests(self, instances: list[InstanceFacts]) -> InstanceFacts:
        return min(instances, key=lambda one: (self.running[one.instance_id], one.instance_id))


class RoundRobin(Rival):
    """Each instance in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._number = -1

    def pick(self, facts: RoutingFacts, instances: list[InstanceFacts]) -> InstanceFacts:
        self._number += 1
        return instances[self._number % len(instances)]


class Threshold(Rival):
    """Cache-aware by thresholds, as SGLang's and vLLM's routers: where more than `match` of the prompt is cached,
    unless requests are out of balance by more than `more` and by `times`; then, and for other prompts, the fewest
    requests.
    """

    def __init__(self, *, match: float = 0.3, more: int = 64, times: float = 1.5) -> None:
        super().__init__()
        self._match, self._more, self._times = match, more, times

    def pick(self, facts: RoutingFacts, instances: list[InstanceFacts]) -> InstanceFacts:
        counts = [self.running[one.instance_id] for one in instances]
        most, fewest = max(counts), min(counts)
        if most - fewest > self._more and most > self._times * fewest:
            return self.fewest_requests(instances)
        best = max(instances, key=lambda one: facts.cached_tokens.get(one.instance_id, 0))
        if facts.cached_tokens.get(best.instance_id, 0) > self._match * facts.input_tokens:
            return best
        return self.fewest_requests(instances)


class ConsistentHash(Rival):
    """The instance to which the first block is hashed; with `bound`, among those with at most so many times the mean of
    the requests in flight.
    """

    def __init__(self, bound: float | None = None) -> None:
        super().__init__()
        self._bound = bound

    def pick(self, facts: RoutingFacts, instances: list[InstanceFacts]) -> InstanceFacts:
        if self._bound is not None:
            mean = (sum(self.running[one.instance_id] for one in instances) + 1) / len(instances)
            most = max(1.0, self._bound * mean)
            instances = [one for one in instances if self.running[one.instance_id] < most]
        home = home_instance(facts.home_key, instances)
        return next(one for one in instances if one.instance_id == home)


ROUTERS: dict[str, Callable[[], Router]] = {
    "cache-aware": PolicyRouter,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "threshold": Threshold,
    "threshold-8": lambda: Threshold(more=8),
    "consistent-hash": ConsistentHash,
    "bounded-hash": lambda: ConsistentHash(bound=1.25),
}
"""By name; `cache-aware` is the live policy."""
