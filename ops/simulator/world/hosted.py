"""A simulated node, and an instance that it hosts."""

from dataclasses import dataclass
from typing import TypedDict

from controlplane.policies.assignment.facts import SlotRef
from controlplane.policies.facts import Endpoint
from dataplane.protocol.layouts import Layout, slots_of
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.results.results import State
from ops.simulator.servers.pool_slot import PooledServer
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.world.usage import Use


@dataclass(frozen=True, kw_only=True)
class FleetNode:
    """A node. `layout`: GPUs of each slot at the beginning. `regroups`: whether plans may regroup them; a slot's number
    is then that of its first GPU, as in the live service. `host_bytes`: host memory for the models of all its slots;
    None: the node does not report it, and no instance is pooled there. `weights_bytes`: memory for weights of each GPU;
    None: not reported.
    """

    name: str
    region: str
    gpu_type: str
    layout: Layout
    regroups: bool = False
    host_bytes: int | None = None
    weights_bytes: int | None = None

    @property
    def slots(self) -> dict[int, int]:
        """GPUs of each slot at the beginning, by its number."""
        return slots_of(self.layout) if self.regroups else dict(enumerate(self.layout))


@dataclass(slots=True, kw_only=True)
class HostedInstance:
    """An instance.

    Attributes:
        ready_s: when it serves, if it is warming; a later start replaces the time of an earlier one.
        donated_s: when it was donated last.
        pooled: it shares its slot and has no GPUs of its own.
        in_pool_slot: it has GPUs of its own in a slot of a pool; they count as the pool's.
        succeeds: the instance that it was started to replace.
    """

    server: DedicatedServer | PooledServer
    node: FleetNode
    slot: int
    gpus: int
    kind: InstanceKind
    state: State = "warming"
    ready_s: float = 0.0
    donated_s: float = 0.0
    pooled: bool = False
    in_pool_slot: bool = False
    succeeds: str | None = None

    @property
    def ref(self) -> SlotRef:
        return self.node.name, self.slot

    @property
    def endpoint(self) -> Endpoint:
        return self.server.endpoint

    @property
    def use(self) -> Use:
        state: State = "pooled" if self.pooled and self.state == "serving" else self.state
        return Use(self.endpoint, state, self.kind, self.node.gpu_type, 0 if self.in_pool_slot else self.gpus)


class Changes(TypedDict, total=False):
    """What of an instance becomes something else."""

    state: State
    kind: InstanceKind
    pooled: bool
    in_pool_slot: bool
    gpus: int
