"""Simulated nodes whose instances follow the decisions of scaling, as live nodes follow their desired state.

    free GPUs --local, remote--> warming --> serving --> draining --> spot --spot_same--> warming
                                    ^           ^           |           |
                                    |           +--revived--+           v
                                    +--------spot_other (redeploy)-- stopped

An instance holds its GPUs in every state but the last. GPUs of a slot are never held twice. A pooled one has none: its
slot is the pool's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Unpack

from controlplane.policies.assignment.facts import Donation, PlacedInstance, SlotAdd, SlotDecision, SlotRef
from controlplane.policies.facts import Endpoint, InstanceFacts, NodeFacts
from controlplane.policies.placement.facts import StartTimes
from controlplane.policies.scale import ScaleDecision
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.kernel.events import Events, Kind
from ops.simulator.kernel.requests import Served
from ops.simulator.results.results import Start
from ops.simulator.servers.pool_slot import PooledServer
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.world.fleet_layouts import FleetLayouts
from ops.simulator.world.fleet_pools import FleetPools
from ops.simulator.world.hosted import Changes, FleetNode, HostedInstance
from ops.simulator.world.spot_starts import SpotStarts
from ops.simulator.world.usage import Usage
from ops.simulator.world.world import World

MakeServer = Callable[[SlotAdd, str], DedicatedServer]
"""Makes the server of an instance of its own with this id."""


class Fleet:
    """All nodes. `weights`: endpoints whose region holds the model's weights; it grows by what is loaded there."""

    def __init__(
        self,
        nodes: Iterable[FleetNode],
        make: MakeServer,
        world: World,
        events: Events,
        *,
        times: StartTimes,
        spot_starts: SpotStarts,
        weights: Iterable[Endpoint],
        pools: FleetPools,
        layouts: FleetLayouts,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.down: set[str] = set()
        self.hosted: dict[str, HostedInstance] = {}
        self.weights = set(weights)
        self.starts: Counter[Start] = Counter()
        self.scale_outs = self.scale_ins = self.unplaced = self.failures = self.interrupted = 0
        self._make = make
        self._world = world
        self._events = events
        self._times = times
        self._spot_starts = spot_starts
        self.pools = pools
        self.layouts = layouts
        self._started = 0

    @property
    def usage(self) -> Usage:
        return self._world.usage

    def node_facts(self) -> tuple[NodeFacts, ...]:
        """The nodes for the snapshot; a node that is down is silent."""
        now_s = self._events.now_s
        return tuple(
            self.layouts.facts(node, now_s, age_s=inf if node.name in self.down else 0.0)
            for node in self.nodes.values()
        )

    def regroup(self) -> None:
        """Regroup slots that are empty."""
        self.layouts.regroup({one.ref for one in self.hosted.values()})

    def placed(self, reports: Mapping[str, InstanceFacts]) -> tuple[PlacedInstance, ...]:
        """The instances for the snapshot, with their reports by id."""
        now_s = self._events.now_s
        going = {(name, slot) for name in self.nodes for slot in self.layouts.going(name)}
        return tuple(
            PlacedInstance(
                instance_id=name,
                endpoint=one.endpoint,
                gpu_type=one.node.gpu_type,
                node_id=one.node.name,
                slot=one.slot,
                gpus=one.gpus,
                draining=one.state == "draining",
                ready=one.state == "serving",
                remaining_tokens=one.server.remaining_tokens,
                kind=one.kind,
                donation=Donation(age_s=now_s - one.donated_s) if one.state == "spot" else None,
                leaving=f"slot {one.slot} of node {one.node.name} is regrouped" if one.ref in going else None,
                overdue=one.ref in going and self.layouts.is_overdue(one.node.name, now_s),
                succeeds=one.succeeds,
                pooled=one.pooled,
                report=reports.get(name),
            )
            for name, one in self.hosted.items()
        )

    def begin_with(self, adds: Iterable[SlotAdd]) -> None:
        """Start instances at the beginning, without any wait."""
        for add in adds:
            self._start(add, "present", 0.0)

    def apply(self, decision: ScaleDecision) -> None:
        """Apply a decision. Pooled instances that get GPUs of their own are dedicated from now on."""
        for name, gpus in decision.dedicated.items():
            hosted = self.hosted[name]
            assert isinstance(hosted.server, PooledServer)
            hosted.server.pooled = False
            self._turn(hosted, pooled=False, gpus=gpus)
            self._settle_slot(hosted.ref)
        for name, kind in decision.kinds.items():
            self._turn(self.hosted[name], kind=kind)
        for name, predecessor in decision.successors.items():
            self.hosted[name].succeeds = predecessor
        self._apply_slots(decision.slots)

    def _apply_slots(self, decision: SlotDecision) -> None:
        for change in decision.revives:
            self.starts["revived"] += 1
            self._serve(self.hosted[change.instance_id], change.kind)
        for change in decision.reclaims:
            hosted = self.hosted[change.instance_id]
            self._warm(hosted, "spot_same", self._spot_starts.draw_s(hosted.ref), change.kind)
        for add in decision.redeploys:
            for name in add.replaces:
                self._stop(name)
            self._start(add, *self._source(add, near="spot_other", near_s=self._times.donated_other_s))
        for add in decision.adds:
            self._start(add, *self._source(add, near="local", near_s=self._times.local_s))
        for change in decision.drains:
            self._drain(change.instance_id, self._stop)
        for change in decision.donates:
            self._drain(change.instance_id, self._donate)
        for change in decision.stops:
            self._stop(change.instance_id)
        self.scale_outs += sum(map(len, (decision.revives, decision.reclaims, decision.redeploys, decision.adds)))
        self.scale_ins += len(decision.drains) + len(decision.donates)
        self.unplaced += sum(each.count for each in decision.unplaced)

    def fail(self, name: str) -> list[Served]:
        """Take a node down at once; returns the requests that were there. Its instances are removed later, by `forget`;
        donated instances are stopped at once.
        """
        self.down.add(name)
        self.failures += 1
        lost: list[Served] = []
        for instance_id, one in list(self.hosted.items()):
            if one.node.name == name and one.state == "spot":
                self._stop(instance_id)
            elif one.node.name == name:
                lost += one.server.lose()
                one.ready_s = inf
                self._world.present.withdraw(one.server)
        self.interrupted += len(lost)
        return lost

    def forget(self, name: str) -> None:
        """Remove all instances of a failed node."""
        for instance_id in [key for key, one in self.hosted.items() if one.node.name == name]:
            self._stop(instance_id)

    def recover(self, name: str) -> None:
        """Bring a node back, empty."""
        self.forget(name)
        self.down.discard(name)

    def _source(self, add: SlotAdd, *, near: Start, near_s: float) -> tuple[Start, float]:
        """The source of a fresh instance's weights, and its start time."""
        if not add.gpus and self._in_host_memory(add):
            return "host", self._spot_starts.draw_s((add.node_id, add.slot))
        return (near, near_s) if add.endpoint in self.weights else ("remote", self._times.remote_s)

    def _in_host_memory(self, add: SlotAdd) -> bool:
        """Whether a node has the model loaded already."""
        here = (one for one in self.hosted.values() if one.node.name == add.node_id and one.endpoint == add.endpoint)
        return any(one.state != "warming" for one in here)

    def _start(self, add: SlotAdd, start: Start, takes_s: float) -> None:
        node, ref = self.nodes[add.node_id], (add.node_id, add.slot)
        taken, gpus = sum(one.gpus for one in self.hosted.values() if one.ref == ref), self.layouts.gpus_of(ref)
        assert taken + add.gpus <= gpus, f"{add} finds {taken} of {gpus} GPUs held"
        self._started += 1
        name = f"{add.endpoint.region}/{add.endpoint.model}/{self._started}"
        pooled = not add.gpus
        server = self.pools.start(add, name, gpus) if pooled else self._make(add, name)
        hosted = HostedInstance(
            server=server,
            node=node,
            slot=add.slot,
            gpus=add.gpus,
            kind=add.kind,
            pooled=pooled,
            succeeds=add.succeeds,
        )
        self.hosted[name] = hosted
        self.usage.change(None, hosted.use, self._events.now_s)
        self._settle_slot(hosted.ref)
        self._warm(hosted, start, takes_s, add.kind)

    def _warm(self, hosted: HostedInstance, start: Start, takes_s: float, kind: InstanceKind) -> None:
        """Start an instance, which serves after `takes_s`."""
        self.starts[start] += 1
        ready_s = hosted.ready_s = self._events.now_s + takes_s
        self._turn(hosted, state="warming", kind=kind)
        if takes_s:
            self._events.at(ready_s, Kind.END, partial(self._warmed, hosted, ready_s))
        else:
            self._serve(hosted, kind)

    def _warmed(self, hosted: HostedInstance, ready_s: float) -> None:
        if hosted.state == "warming" and hosted.ready_s == ready_s:
            self._serve(hosted, hosted.kind)

    def _serve(self, hosted: HostedInstance, kind: InstanceKind) -> None:
        self.weights.add(hosted.endpoint)
        self._turn(hosted, state="serving", kind=kind)
        hosted.server.open(kind)
        self._world.present.place(hosted.server)

    def _drain(self, name: str, then: Callable[[str], None]) -> None:
        hosted = self.hosted[name]
        serving = hosted.state == "serving"
        self._turn(hosted, state="draining")
        self._world.present.withdraw(hosted.server)
        if serving:
            hosted.server.close(partial(then, name))
        else:
            self._stop(name)

    def _donate(self, name: str) -> None:
        hosted = self.hosted[name]
        hosted.donated_s = self._events.now_s
        self._turn(hosted, state="spot")

    def _stop(self, name: str) -> None:
        hosted = self.hosted.pop(name)
        self._world.present.withdraw(hosted.server)
        self.usage.change(hosted.use, None, self._events.now_s)
        hosted.state, hosted.ready_s = "draining", inf
        if isinstance(hosted.server, PooledServer):
            hosted.server.leave()
            self._settle_slot(hosted.ref)

    def _settle_slot(self, ref: SlotRef) -> None:
        """Keep a slot in a pool while it has a pooled instance, and count its other instances accordingly."""
        if ref not in self.pools:
            return
        here = [one for one in self.hosted.values() if one.ref == ref]
        pooled = any(one.pooled for one in here)
        if not pooled:
            self.pools.end(ref)
        for one in here:
            self._turn(one, in_pool_slot=pooled and not one.pooled)

    def _turn(self, hosted: HostedInstance, **changes: Unpack[Changes]) -> None:
        """Change fields of an instance, and count it accordingly from now on."""
        before = hosted.use
        for name, value in changes.items():
            setattr(hosted, name, value)
        hosted.server.kind = hosted.kind
        if hosted.use != before:
            self.usage.change(before, hosted.use, self._events.now_s)
