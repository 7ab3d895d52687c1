"""The world: requests come from regions, go where the live service's own policies send them, and are counted.

    request --> choose_route on a view --> over the network --> a server --> back over the network
       |                                                           ^
       +-- NIW --> queue --> choose_releases at each signal -------+

A view of all instances is taken every `view_s` and is up to that old when it is used, but for what was sent since.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from controlplane.policies.decisions import NoRoute
from controlplane.policies.facts import InstanceFacts, RoutingFacts
from controlplane.policies.facts import Tier as PolicyTier
from controlplane.policies.release import ReleaseSettings
from controlplane.policies.routing import RoutingSettings, choose_preference, choose_route
from dataplane.messages import Tier
from dataplane.turns.tiers import TIER_TARGETS
from ops.simulator.deferred import Deferred
from ops.simulator.events import EventLog, Events, Kind
from ops.simulator.measures import Tally
from ops.simulator.requests import Request, Served, Target

ARRIVED, ROUTED, ENDED, FAILED, RELEASED = range(5)
"""Codes of the event log."""


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

    def reports(self) -> Iterable[InstanceFacts]:
        """Its instances as of now."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """`latencies_ms`: one way, by origin and destination; what is not there, and within a region, takes no time."""

    regions: tuple[str, ...]
    latencies_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    targets: Mapping[Tier, Target] = field(
        default_factory=lambda: {t: Target(ttft_s=x.ttft_s, tbt_s=x.tbt_s) for t, x in TIER_TARGETS.items()}
    )
    view_s: float = 1.0
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    release: ReleaseSettings = field(default_factory=ReleaseSettings)


class World:
    """Runs traffic through servers. `servers` are by instance id; one may stand under several."""

    def __init__(self, settings: WorldSettings, events: Events, traffic: Iterator[Request]) -> None:
        self.settings = settings
        self.events = events
        self.log = EventLog()
        self.tallies: dict[tuple[str, Tier], Tally] = {}
        self.failures: dict[str, int] = {}
        self.in_flight = 0
        self.arrived = 0
        self.request_seconds = 0.0
        """The time-integral of the requests in the system."""
        self._counted_s = 0.0
        self._traffic = traffic
        self._coming: Request | None = None
        self._servers: dict[str, Server] = {}
        self._places: dict[str, int] = {}
        self._views: dict[str, dict[str, InstanceFacts]] = {}
        self._deferred = Deferred(settings.release, settings.targets["NIW"].ttft_s)
        self._preferences: dict[str, tuple[str, ...]] = {}

    @property
    def servers(self) -> list[Server]:
        """Each of them once."""
        return list({id(server): server for server in self._servers.values()}.values())

    def place(self, server: Server) -> None:
        """Put a server into the world, under the ids of its instances."""
        for report in server.reports():
            assert report.instance_id not in self._servers
            self._servers[report.instance_id] = server
            self._places[report.instance_id] = len(self._places)

    def run(self) -> Iterator[float]:
        """Run until all that came is over; now and then the time is told."""
        self._read()
        self.events.at(0.0, Kind.TICK, self._tick)
        self._take_view()
        while self.events.run_next():
            if self.events.count % 1024 == 0:
                yield self.events.now_s
        assert not self.in_flight
        self._count(0)

    def ended(self, served: Served) -> None:
        """The last token of a request is out."""
        self.log.note(self.events.now_s, ENDED, served.request.number, served.in_time)
        self._count(-1)
        self._tally(served.request).add(served)

    def _read(self) -> None:
        """Ask for the next arrival."""
        request = self._coming = next(self._traffic, None)
        if request is not None:
            self.events.at(request.arrived_s, Kind.ARRIVAL, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        self.log.note(self.events.now_s, ARRIVED, request.number)
        self.arrived += 1
        self._count(1)
        if request.tier == "NIW":
            self._deferred.add(request)
        else:
            self._route(request, self._preference(request.origin))
        self._read()

    def _route(self, request: Request, preference: tuple[str, ...], within: str | None = None) -> None:
        """Send a request where the policy says. `within`: only there, in this region."""
        view = self._views.get(request.model, {})
        target = self.settings.targets[request.tier]
        facts = RoutingFacts(
            model=request.model,
            tier=PolicyTier(request.tier),
            tokens=request.prompt_tokens + request.output_tokens,
            preference=preference,
            instances=tuple(one for one in view.values() if within is None or one.endpoint.region == within),
            ttft_s=target.ttft_s,
        )
        route = choose_route(facts, self.events.now_s, self.settings.routing)
        if isinstance(route, NoRoute):
            self._fail(request, route.reason)
            return
        server = self._servers[route.instance_id]
        if not server.fits(request):
            self._fail(request, "longer than an instance's KV memory")
            return
        one = view[route.instance_id]
        view[route.instance_id] = replace(
            one,
            sent_tokens=one.sent_tokens + facts.tokens,
            sent_input_tokens=one.sent_input_tokens + request.prompt_tokens,
        )
        self.log.note(self.events.now_s, ROUTED, request.number, self._places[route.instance_id])
        there_s = self._travel_s(request.origin, route.region)
        served = Served(request=request, target=target, back_s=self._travel_s(route.region, request.origin))
        if there_s:
            self.events.at(self.events.now_s + there_s, Kind.ARRIVAL, lambda: server.submit(served))
        else:
            server.submit(served)

    def _tick(self) -> None:
        """Take a view, and let deferred requests go where there is room."""
        self._take_view()
        instances = tuple(one for view in self._views.values() for one in view.values())
        for request, region in self._deferred.release(instances, self.events.now_s):
            self.log.note(self.events.now_s, RELEASED, request.number)
            self._route(request, (region,), within=region)
        if self._coming or self.in_flight:
            self.events.at(self.events.now_s + self.settings.view_s, Kind.TICK, self._tick)

    def _take_view(self) -> None:
        self._views.clear()
        for server in self.servers:
            for report in server.reports():
                self._views.setdefault(report.endpoint.model, {})[report.instance_id] = report

    def _fail(self, request: Request, reason: str) -> None:
        self.log.note(self.events.now_s, FAILED, request.number)
        self._count(-1)
        self._tally(request).fail(request)
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def _tally(self, request: Request) -> Tally:
        return self.tallies.setdefault((request.model, request.tier), Tally())

    def _count(self, change: int) -> None:
        now_s = self.events.now_s
        self.request_seconds += self.in_flight * (now_s - self._counted_s)
        self.in_flight, self._counted_s = self.in_flight + change, now_s

    def _preference(self, origin: str) -> tuple[str, ...]:
        if origin not in self._preferences:
            regions, latencies_ms = self.settings.regions, self.settings.latencies_ms
            self._preferences[origin] = choose_preference(regions, origin, latencies_ms)
        return self._preferences[origin]

    def _travel_s(self, origin: str, destination: str) -> float:
        return self.settings.latencies_ms.get((origin, destination), 0.0) / 1000
