"""The world: requests come from regions, go where the live service's own policies send them, and are counted.

    request --> choose_admission --> choose_route on a view --> over the network --> a server --> back over the network
       |                                  ^                          |
       |                                  +------ it is gone --------+
       +-- NIW --> queue --> choose_releases at each signal ---> (the same way)

A view of all instances is up to `view_s` old when it is used, but for what was sent since.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from controlplane.policies.admission import AdmissionSettings, choose_admission
from controlplane.policies.decisions import NoRoute, Refuse
from controlplane.policies.facts import AdmissionFacts, Endpoint, InstanceFacts, Objective, RoutingFacts
from controlplane.policies.facts import Tier as PolicyTier
from controlplane.policies.release import ReleaseSettings
from controlplane.policies.routing import RoutingSettings, choose_route
from dataplane.messages import Tier
from dataplane.turns.tiers import TIER_TARGETS
from ops.simulator.deferred import Deferred
from ops.simulator.demand import Demand
from ops.simulator.events import ARRIVAL, TICK, EventLog, Events
from ops.simulator.measures import Tally, by_model_and_tier
from ops.simulator.network import Network
from ops.simulator.recorder import STEP_S, Recorder
from ops.simulator.requests import Request, Served, Target
from ops.simulator.usage import Usage

ARRIVED, ROUTED, ENDED, FAILED, RELEASED, INTERRUPTED = range(6)
"""Codes of the event log."""

_ATTEMPTS_MAX = 3
_TOLD_EVERY = 1024
_BLOCK = 1024
"""So many requests are counted at once when they are over."""
_TIERS = {tier.value: tier for tier in PolicyTier}


class Server(Protocol):
    """What serves requests of some instances: an instance's slot, a pool, a cluster. `slots`: how many it has."""

    slots: int

    @property
    def busy_s(self) -> float:
        """For how long its slots have worked, all of them together."""

    @property
    def switches(self) -> int:
        """How often a slot changed its model."""

    def fits(self, request: Request) -> bool:
        """Whether it could ever serve the request."""

    def submit(self, served: Served) -> None:
        """Take in a request that fits."""

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """Its instances as of now; if a model is named, that of the model, which is one of its own."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """`latencies_ms`: one way, by origin and destination; what is not there, and within a region, takes no time.
    `learn_s`: requests before this moment are counted as demand, not served. `admission` None: all are let in.
    """

    regions: tuple[str, ...]
    latencies_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    targets: Mapping[Tier, Target] = field(
        default_factory=lambda: {t: Target(ttft_s=x.ttft_s, tbt_s=x.tbt_s) for t, x in TIER_TARGETS.items()}
    )
    view_s: float = 1.0
    learn_s: float = 0.0
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    release: ReleaseSettings = field(default_factory=ReleaseSettings)
    admission: AdmissionSettings | None = None


class World:
    """Runs traffic through servers. `servers`: each one that ever stood in it, once. `endpoints`: those recorded."""

    def __init__(
        self, settings: WorldSettings, events: Events, traffic: Iterator[Request], endpoints: Iterable[Endpoint] = ()
    ) -> None:
        self.settings = settings
        self.events = events
        self.log = EventLog()
        self.demand = Demand()
        self.usage = Usage()
        self.recorder = Recorder(endpoints, self.usage, self.demand)
        self.deferred = Deferred(settings.release, settings.targets["NIW"].ttft_s)
        self.servers: dict[Server, None] = {}
        self.tallies: defaultdict[tuple[str, Tier], Tally] = defaultdict(Tally)
        """What came of requests, by model and tier: complete when the world is over."""
        self.failures: dict[str, int] = {}
        self.in_flight = 0
        self.arrived = 0
        self.request_seconds = 0.0
        """The time-integral of the requests in the system."""
        self._counted_s = settings.learn_s
        self._served: list[Served] = []
        self._traffic = traffic
        self._coming: Request | None = None
        self._present: dict[str, Server] = {}
        self._of_model: dict[str, dict[Server, None]] = {}
        self._places: dict[str, int] = {}
        self._views: dict[str, dict[str, InstanceFacts]] = {}
        self._network = Network(settings.regions, settings.latencies_ms)

    # Servers come and go.

    def place(self, server: Server) -> None:
        """Put a server into the world, under the ids of its instances."""
        self.servers[server] = None
        for report in server.reports():
            assert report.instance_id not in self._present
            self._present[report.instance_id] = server
            self._of_model.setdefault(report.endpoint.model, {})[server] = None
            self._places.setdefault(report.instance_id, len(self._places))

    def withdraw(self, server: Server) -> None:
        """Send it nothing more; it may have been withdrawn before. What is on the way there is sent elsewhere."""
        for report in server.reports():
            self._present.pop(report.instance_id, None)
            self._of_model.get(report.endpoint.model, {}).pop(server, None)

    # Time passes.

    @property
    def over(self) -> bool:
        """Whether nothing comes any more and nothing is in the system."""
        return self._coming is None and not self.in_flight

    def run(self) -> Iterator[float]:
        """Learn, then serve until all that came is over; now and then the time is told."""
        yield from self._learn()
        begins_s = self.events.now_s = self.settings.learn_s
        self.usage.begin(begins_s)
        self.recorder.begin(begins_s)
        self.events.at(begins_s, TICK, self._tick)
        self.events.at(begins_s + STEP_S, TICK, self._close_step)
        self.events.stopped = self.over
        while self.events.run(_TOLD_EVERY):
            yield self.events.now_s
        self._count(0)
        self._take_in_served()

    def _learn(self) -> Iterator[float]:
        """Count the demand of the past, up to the first request that is served."""
        for number, request in enumerate(self._traffic):
            if request.arrived_s >= self.settings.learn_s:
                self._expect(request)
                return
            if request.tier != "NIW":
                self.demand.count(request)
            if number % _TOLD_EVERY == 0:
                yield request.arrived_s

    def _tick(self) -> None:
        """Instances report, and deferred requests go where there is room."""
        self._views.clear()
        now_s = self.events.now_s
        for request in self.deferred.expire(now_s):
            self._fail(request, "its deadline passed while it waited")
        if any(waits for waits, _ in self.deferred.waiting(now_s).values()):
            instances = tuple(one for model in self._of_model for one in self.view(model).values())
            for request, region in self.deferred.release(instances, now_s):
                self.log.note(now_s, RELEASED, request.number)
                self.demand.count_deferred(request, region, now_s)
                self._send(request, region)
        self.events.at(now_s + self.settings.view_s, TICK, self._tick)

    def _close_step(self) -> None:
        now_s = self.events.now_s
        views = {model: self.view(model) for model in self._of_model}
        self._take_in_served()
        self.recorder.close(now_s, views, self.deferred.waiting(now_s))
        self.events.at(now_s + STEP_S, TICK, self._close_step)

    # A request, from its arrival to its end.

    def _expect(self, request: Request | None) -> None:
        self._coming = request
        if request is not None:
            self.events.at(request.arrived_s, ARRIVAL, self._arrive, request)
        self.events.stopped = self.over

    def _arrive(self, request: Request) -> None:
        self.log.note(self.events.now_s, ARRIVED, request.number)
        self.arrived += 1
        self._count(1)
        if request.tier == "NIW":
            self.deferred.add(request)
        else:
            self.demand.count(request)
            self._admit(request)
        self._expect(next(self._traffic, None))

    def _admit(self, request: Request) -> None:
        """Let an interactive request in, or refuse it."""
        settings, target = self.settings.admission, self.settings.targets[request.tier]
        if settings is not None:
            objective = Objective(ttft_s=target.ttft_s, tbt_s=target.tbt_s)
            facts = AdmissionFacts(routing=self._facts(request), objective=objective)
            if isinstance(choose_admission(facts, self.events.now_s, settings), Refuse):
                self._fail(request, "refused: no instance would have begun it in time")
                return
        self._send(request)

    def _send(self, request: Request, within: str | None = None, tried: frozenset[str] = frozenset()) -> None:
        """Send a request where the policy says. `within`: only there, in this region. `tried`: not there again."""
        facts = self._facts(request, within, tried)
        route = choose_route(facts, self.events.now_s, self.settings.routing)
        if isinstance(route, NoRoute):
            self._fail(request, route.reason)
            return
        view = self._views[request.model]
        one = view[route.instance_id]
        view[route.instance_id] = replace(
            one,
            sent_tokens=one.sent_tokens + facts.tokens,
            sent_input_tokens=one.sent_input_tokens + request.prompt_tokens,
        )
        self.log.note(self.events.now_s, ROUTED, request.number, self._places[route.instance_id])
        target, back_s = self.settings.targets[request.tier], self._network.travel_s(route.region, request.origin)
        served = Served(request=request, target=target, back_s=back_s)
        if there_s := self._network.travel_s(request.origin, route.region):
            arrives_s = self.events.now_s + there_s
            self.events.at(arrives_s, ARRIVAL, self._deliver, served, route.instance_id, within, tried)
        else:
            self._deliver(served, route.instance_id, within, tried)

    def _deliver(self, served: Served, instance_id: str, within: str | None, tried: frozenset[str]) -> None:
        """A request is at its instance, which takes it in unless it is gone since the view was taken."""
        request, server = served.request, self._present.get(instance_id)
        if server is None:
            tried |= {instance_id}
            if len(tried) < _ATTEMPTS_MAX:
                self._send(request, within, tried)
            else:
                self._fail(request, f"{_ATTEMPTS_MAX} instances were gone when it came there")
        elif not server.fits(request):
            self._fail(request, "longer than an instance's KV memory")
        else:
            server.submit(served)

    def ended(self, served: Served) -> None:
        """The last token of a request is out."""
        self.log.note(self.events.now_s, ENDED, served.request.number, served.in_time)
        self._count(-1)
        self._served.append(served)
        if len(self._served) == _BLOCK:
            self._take_in_served()

    def begin_anew(self, served: Served) -> None:
        """A request has lost its instance, and what it had made there."""
        request = served.request
        self.log.note(self.events.now_s, INTERRUPTED, request.number)
        if request.tier == "NIW":
            self.deferred.put_back(request)
        else:
            self._send(request)

    def _fail(self, request: Request, reason: str) -> None:
        self.log.note(self.events.now_s, FAILED, request.number)
        self._count(-1)
        self.tallies[request.model, request.tier].fail(request)
        self.failures[reason] = self.failures.get(reason, 0) + 1

    # What is known, and what is counted.

    def view(self, model: str) -> dict[str, InstanceFacts]:
        """The instances of a model, by id, as of the first look since the last tick."""
        if model not in self._views:
            servers = self._of_model.get(model, {})
            reports = [report for server in servers for report in server.reports(model)]
            self._views[model] = {report.instance_id: report for report in reports}
        return self._views[model]

    def _facts(self, request: Request, within: str | None = None, tried: frozenset[str] = frozenset()) -> RoutingFacts:
        instances = tuple(self.view(request.model).values())
        if within is not None:
            instances = tuple(one for one in instances if one.endpoint.region == within)
        return RoutingFacts(
            model=request.model,
            tier=_TIERS[request.tier],
            tokens=request.prompt_tokens + request.output_tokens,
            preference=self._network.preference(request.origin) if within is None else (within,),
            instances=instances,
            excluded=tried,
            ttft_s=self.settings.targets[request.tier].ttft_s,
        )

    def _count(self, change: int) -> None:
        now_s = self.events.now_s
        self.request_seconds += self.in_flight * (now_s - self._counted_s)
        self.in_flight += change
        self._counted_s = now_s
        if not self.in_flight:
            self.events.stopped = self.over

    def _take_in_served(self) -> None:
        """Count those that were served since the last time."""
        for (model, tier), some in by_model_and_tier(self._served).items():
            self.tallies[model, tier].add(some)
            self.recorder.ended(tier, some)
        self._served.clear()
