"""Waiting requests move to idle instances by the live policy, at each renewal of the views.

it waits at a --> asked back, over the network --> its prefill has begun: it stays
                                               --> it has not: back over the network, then sent to b
"""

from collections.abc import Callable, Mapping

from controlplane.policies.decisions import Reroute, Route
from controlplane.policies.facts import InstanceFacts
from controlplane.policies.rerouting import (
    ReroutingFacts,
    ReroutingSettings,
    WaitingRequest,
    choose_reroutes,
    may_reroute,
)
from dataplane.protocol.tiers import NIW
from ops.simulator.kernel.events import ARRIVAL, Events
from ops.simulator.kernel.network import Network
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.traffic.presence import Presence
from ops.simulator.world.routing import KnownPrompts


class Rerouter:
    """The rerouting of a world. `send_to` sends a request by a route. `settings` None: nothing moves."""

    def __init__(
        self,
        present: Presence,
        events: Events,
        network: Network,
        prompts: KnownPrompts,
        send_to: Callable[[Request, Route], None],
        settings: ReroutingSettings | None,
    ) -> None:
        self._present = present
        self._events = events
        self._network = network
        self._prompts = prompts
        self._send_to = send_to
        self._settings = settings
        self._looks = 0
        self.moved: set[int] = set()
        """Numbers of the requests that were asked back, each once as in the live service."""

    def look(self) -> None:
        """Move what waits where an instance is idle."""
        settings = self._settings
        if settings is None:
            return
        self._looks += 1
        for view in self._present.views().values():
            if may_reroute(view.values(), settings):
                waiting = self._waiting(view)
                asked = tuple([self._asked(served, name) for served, name in waiting.values()])
                facts = ReroutingFacts(instances=tuple(view.values()), waiting=asked, seed=self._looks)
                for reroute in choose_reroutes(facts, self._events.now_s, settings):
                    served, name = waiting[reroute.request_id]
                    self._ask_back(served, view[name], reroute)

    def _waiting(self, view: Mapping[str, InstanceFacts]) -> dict[str, tuple[Served, str]]:
        """The interactive requests that wait, and on which instance, by their ids."""
        servers = {name: self._present.at(name) for name in view}
        return {
            str(served.request.number): (served, name)
            for name, server in servers.items()
            if isinstance(server, DedicatedServer)
            for served in server.waiting()
            if served.request.tier != NIW and served.request.number not in self.moved
        }

    def _asked(self, served: Served, instance_id: str) -> WaitingRequest:
        request = served.request
        return WaitingRequest(
            request_id=str(request.number),
            instance_id=instance_id,
            tier=request.tier,
            input_tokens=request.prompt_tokens,
            sent_s=request.arrived_s,
            output_tokens_max=request.output_tokens,
            cached_tokens=self._prompts.cached_when_sent(request),
        )

    def _ask_back(self, served: Served, source: InstanceFacts, reroute: Reroute) -> None:
        self.moved.add(served.request.number)
        there_s = self._network.travel_s(served.request.origin, source.endpoint.region)
        self._after(there_s, self._withdraw, served, source, reroute.route)

    def _withdraw(self, served: Served, source: InstanceFacts, route: Route) -> None:
        """An instance is asked for a request, unless it is gone."""
        request, server = served.request, self._present.at(source.instance_id)
        if isinstance(server, DedicatedServer) and server.withdraw(served):
            self._prompts.withdrawn(request)
            self._after(self._network.travel_s(source.endpoint.region, request.origin), self._send_to, request, route)

    def _after(self, travel_s: float, call: Callable[..., None], *values: object) -> None:
        if travel_s:
            self._events.at(self._events.now_s + travel_s, ARRIVAL, call, *values)
        else:
            call(*values)
