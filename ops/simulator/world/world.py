"""The world: requests arrive in regions, are routed by the live service's own policies, and are counted.

    request --> choose_admission --> choose_route on a view --> over the network --> a server --> back over the network
       |                                  ^                          |
       |                                  +------ it has ended -----+
       +-- NIW --> queue --> choose_releases at each signal ---> (the same way)

A view of all instances is up to `view_s` old when it is used; requests sent since then are counted in.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from controlplane.policies.admission import AdmissionSettings, choose_admission
from controlplane.policies.decisions import NoRoute, Refuse, Route
from controlplane.policies.facts import Endpoint, RoutingFacts
from controlplane.policies.release import ReleaseSettings
from controlplane.policies.rerouting import ReroutingSettings
from controlplane.policies.routing import RoutingSettings
from dataplane.protocol.tiers import NIW, Objective, Tier
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from ops.simulator.kernel.answers import answers_by_model
from ops.simulator.kernel.events import ARRIVAL, TICK, EventLog, Events
from ops.simulator.kernel.network import Network
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.traffic.deferred import Deferred
from ops.simulator.traffic.demand import Demand
from ops.simulator.traffic.presence import Presence
from ops.simulator.world.measures import Tally, by_model_and_tier
from ops.simulator.world.recorder import STEP_S, Recorder
from ops.simulator.world.rerouting import Rerouter
from ops.simulator.world.routing import KnownPrompts, PolicyRouter, Router
from ops.simulator.world.usage import Usage

_SCATTER = 0x9E3779B97F4A7C15
"""The upper bits of multiples of it are as if drawn (Fibonacci hashing). The lower ones go round, as gateways do."""
ARRIVED, ROUTED, ENDED, FAILED, RELEASED, INTERRUPTED = range(6)
"""Codes of the event log."""

_ATTEMPTS_MAX = 3
_TOLD_EVERY = 1024
_BLOCK = 1024
"""So many requests are counted at once when they are over."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """`latencies_ms`: one way, by origin and destination; what is not there, and within a region, takes no time.
    `learn_s`: requests before this moment are counted as demand, not served. `admission` None: all are let in.
    `tries_max`: how often a client sends a request, after the Retry-After of each refusal. `gateways`: how many there
    are, each with its own knowledge of cached prompts. `clairvoyant`: whether queues count the true lengths of answers.
    """

    regions: tuple[str, ...]
    latencies_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    targets: Mapping[Tier, Objective] = field(default_factory=lambda: TIER_OBJECTIVES)
    view_s: float = 1.0
    learn_s: float = 0.0
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    release: ReleaseSettings = field(default_factory=ReleaseSettings)
    rerouting: ReroutingSettings | None = None
    admission: AdmissionSettings | None = None
    tries_max: int = 1
    gateways: int = 1
    clairvoyant: bool = False


class World:
    """Runs traffic through servers. `endpoints`: those recorded. `router`: None is the live policy."""

    def __init__(
        self,
        settings: WorldSettings,
        events: Events,
        traffic: Iterator[Request],
        endpoints: Iterable[Endpoint] = (),
        router: Router | None = None,
    ) -> None:
        self.settings = settings
        self.events = events
        self.log = EventLog()
        self.answers = answers_by_model(clairvoyant=settings.clairvoyant)
        self.present = Presence(self.answers)
        self.demand = Demand()
        self.usage = Usage()
        self.recorder = Recorder(endpoints, self.usage, self.demand)
        self.deferred = Deferred(settings.release, settings.targets[NIW].ttft_s)
        self.tallies: defaultdict[tuple[str, Tier], Tally] = defaultdict(Tally)
        """Figures of requests by model and tier, complete at the end."""
        self.failures: dict[str, int] = {}
        self.in_flight = 0
        self.arrived = 0
        self.request_seconds = 0.0
        """The time-integral of the requests in the system: what those that are over were there for."""
        self._served: list[Served] = []
        self._traffic = traffic
        self._coming: Request | None = None
        self.prompt_tokens = self.cached_tokens = 0
        """Of the ended requests whose blocks are known."""
        self._router = router or PolicyRouter()
        self._prompts = KnownPrompts(settings.gateways)
        self._network = Network(settings.regions, settings.latencies_ms)
        self.rerouter = Rerouter(self.present, events, self._network, self._prompts, self._resend, settings.rerouting)

    # Time passes.

    @property
    def over(self) -> bool:
        """Whether all requests have arrived and ended."""
        return self._coming is None and not self.in_flight

    def run(self) -> Iterator[float]:
        """Learn, then serve until all requests have ended. Yields the simulated time now and then."""
        yield from self._learn()
        begins_s = self.events.now_s = self.settings.learn_s
        self.usage.begin(begins_s)
        self.recorder.begin(begins_s)
        self.events.at(begins_s, TICK, self._tick)
        self.events.at(begins_s + STEP_S, TICK, self._close_step)
        while self._coming is not None:
            for _ in range(_TOLD_EVERY):
                if (request := self._coming) is None:
                    break
                self.events.run_before(request.arrived_s, ARRIVAL)
                self._coming = next(self._traffic, None)
                self._arrive(request)
            yield self.events.now_s
        self.events.keep_up()
        self.events.stopped = self.over
        while self.events.run(_TOLD_EVERY):
            yield self.events.now_s
        self._take_in_served()

    def _learn(self) -> Iterator[float]:
        """Count the demand up to the first request that is served."""
        for number, request in enumerate(self._traffic):
            if request.arrived_s >= self.settings.learn_s:
                self._coming = request
                return
            if request.tier != NIW:
                self.demand.count(request)
            if number % _TOLD_EVERY == 0:
                yield request.arrived_s

    def _tick(self) -> None:
        """Renew the views, and release deferred requests where there is capacity."""
        self.present.tick()
        now_s = self.events.now_s
        self.events.catch_up()
        for answers in self.answers.values():
            answers.learn()
        self.log.close()
        for request in self.deferred.expire(now_s):
            self._fail(request, "its deadline passed while it waited")
        if any(waits for waits, _ in self.deferred.waiting(now_s).values()):
            instances = tuple(one for view in self.present.views().values() for one in view.values())
            for request, region, first in list(self.deferred.release(instances, now_s)):
                self.log.note(now_s, RELEASED, request.number)
                if first:
                    self.demand.count_deferred(request, region, now_s)
                self._send(request, region)
        self.rerouter.look()
        self.events.at(now_s + self.settings.view_s, TICK, self._tick)

    def _close_step(self) -> None:
        now_s = self.events.now_s
        views = self.present.views()
        self.events.catch_up()
        self._take_in_served()
        switches = sum(server.switches for server in self.present.servers)
        self.recorder.close(now_s, views, self.deferred.waiting(now_s), switches=switches)
        self.events.at(now_s + STEP_S, TICK, self._close_step)

    # A request, from its arrival to its end.

    def _arrive(self, request: Request) -> None:
        self.log.note(request.arrived_s, ARRIVED, request.number)
        self.arrived += 1
        self.in_flight += 1
        if request.tier == NIW:
            self.deferred.add(request)
        else:
            self.demand.count(request)
            self.deferred.note_interactive(request)
            if self.settings.admission is None:
                self._send(request)
            else:
                self._admit(request, self.settings.admission)

    def _admit(self, request: Request, settings: AdmissionSettings, tried: int = 0) -> None:
        """Admit an interactive request that was refused `tried` times, or refuse it."""
        decision = choose_admission(self._facts(request), self.events.now_s, settings)
        if not isinstance(decision, Refuse):
            self._send(request)
        elif tried + 1 < self.settings.tries_max:
            again_s = self.events.now_s + decision.retry_after_s
            self.events.at(again_s, ARRIVAL, self._admit, request, settings, tried + 1)
        else:
            self._fail(request, "refused: no instance would have begun it in time")

    def _send(self, request: Request, within: str | None = None, tried: frozenset[str] = frozenset()) -> None:
        """Send a request where the policy decides, `within` a region if given, not to the instances `tried`."""
        facts = self._facts(request, within, tried)
        route = self._router.choose(facts, self.events.now_s, self.settings.routing)
        if isinstance(route, NoRoute) and route.waits:
            self.deferred.put_back(request)
        elif isinstance(route, NoRoute):
            self._fail(request, route.reason)
        else:
            self._send_to(request, route, within, tried)

    def _send_to(
        self, request: Request, route: Route, within: str | None = None, tried: frozenset[str] = frozenset()
    ) -> None:
        now_s = self.events.now_s
        name, region, origin = route.instance_id, route.region, request.origin
        self.log.note(now_s, ROUTED, request.number, self.present.sent(request, name, route.cached_tokens))
        if request.blocks:
            self._prompts.sent(request, route, now_s)
        target = self.settings.targets[request.tier]
        if region == origin:
            self._deliver(Served(request, target), name, within, tried)
            return
        served = Served(request, target, self._network.travel_s(region, origin))
        if there_s := self._network.travel_s(origin, region):
            self.events.at(now_s + there_s, ARRIVAL, self._deliver, served, name, within, tried)
        else:
            self._deliver(served, name, within, tried)

    def _resend(self, request: Request, route: Route) -> None:
        """Send a request that has left its instance to another one, if that is still there."""
        if route.instance_id in self.present.view(request.model):
            self._send_to(request, route)
        else:
            self._send(request)

    def _deliver(self, served: Served, instance_id: str, within: str | None, tried: frozenset[str]) -> None:
        """Submit a request to its instance, or send it elsewhere if the instance has gone since the view."""
        request, server = served.request, self.present.at(instance_id)
        if server is None:
            tried |= {instance_id}
            if len(tried) < _ATTEMPTS_MAX:
                self._send(request, within, tried)
            else:
                self._fail(request, f"{_ATTEMPTS_MAX} instances were gone when it arrived")
        elif not server.fits(request):
            self._fail(request, "longer than an instance's KV memory")
        else:
            server.submit(served)

    def ended(self, served: Served) -> None:
        """Count a request whose last token was made."""
        request, block = served.request, self._served
        self.log.note(served.last_s, ENDED, request.number, served.in_time)
        self._over(request, served.last_s)
        self.answers[request.model].ended(served)
        if request.blocks:
            self._router.ended(self._prompts.ended(served, self.events.now_s))
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += served.cached
        block.append(served)
        if len(block) == _BLOCK:
            self._take_in_served()

    def begin_anew(self, served: Served) -> None:
        """Send a request again that has lost its instance and its tokens."""
        request = served.request
        self.log.note(self.events.now_s, INTERRUPTED, request.number)
        if request.tier == NIW:
            self.deferred.put_back(request)
        else:
            self._send(request)

    def _fail(self, request: Request, reason: str) -> None:
        self.log.note(self.events.now_s, FAILED, request.number)
        self._over(request, self.events.now_s)
        self.tallies[request.model, request.tier].fail(request)
        self.failures[reason] = self.failures.get(reason, 0) + 1

    # What is known, and what is counted.

    def _facts(self, request: Request, within: str | None = None, tried: frozenset[str] = frozenset()) -> RoutingFacts:
        tier = request.tier
        facts = RoutingFacts(
            model=request.model,
            tier=tier,
            preference=self._network.preference(within or request.origin),
            instances=tuple(self.present.view(request.model).values()),
            only_region=within,
            excluded=tried,
            ttft_s=self.settings.targets[tier].ttft_s,
            input_tokens=request.prompt_tokens,
            output_tokens_max=request.output_tokens,
            draw=None if self.settings.gateways == 1 else (request.number * _SCATTER % 2**64) >> 32,
        )
        if not request.blocks:
            return facts
        return replace(
            facts,
            cached_tokens=self._prompts.cached_tokens(request),
            home_key=self._prompts.home_key(request),
        )

    def _over(self, request: Request, at_s: float) -> None:
        self.request_seconds += at_s - request.arrived_s
        self.in_flight -= 1
        if request.tier == Tier.NIW:
            self.deferred.note_over(request)
        if not self.in_flight:
            self.events.stopped = self._coming is None

    def _take_in_served(self) -> None:
        """Count the requests served since the last call."""
        for (model, tier), block in by_model_and_tier(self._served).items():
            self.tallies[model, tier].add(block)
            self.recorder.ended(tier, block)
        self._served.clear()
