"""A simulated node, and an instance that it hosts."""

from dataclasses import dataclass
from typing import TypedDict

from controlplane.policies.assignment.facts import SlotRef
from controlplane.policies.facts import Endpoint
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.results.results import State
from ops.simulator.servers.pool_slot import PooledServer
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.world.usage import Use


@dataclass(frozen=True, kw_only=True)
class FleetNode:
    """A node with `slots` slots of `gpus` GPUs each. `host_bytes`: host memory for the models of all its slots; None:
    the node does not report it, and no instance is pooled there.
    """

    name: str
    region: str
    gpu_type: str
    slots: int
    gpus: int
    host_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class HostedInstance:
    """An instance.

    Attributes:
        ready_s: when it serves, if it is warming; a later start replaces the time of an earlier one.
        donated_s: when it was donated last.
        pooled: it shares its slot and has no GPUs of its own.
        in_pool_slot: it has GPUs of its own in a slot of a pool; they count as the pool's.
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

    @property
    def ref(self) -> SlotRef:
        return self.node.name, self.slot

    @property
    def endpoint(self) -> Endpoint:
        return self.server.endpoint

    @property
    def wanted(self) -> bool:
        """Whether it serves our own requests, now or soon."""
        return self.state in {"serving", "warming"}

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
