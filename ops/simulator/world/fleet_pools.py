"""The pools' slots of a simulated fleet.

A slot is in a pool while it has pooled instances: all its GPUs count as the pool's then, whatever else it holds.
"""

from collections.abc import Callable, Mapping

from controlplane.policies.assignment.facts import SlotAdd, SlotRef
from controlplane.policies.facts import PoolKey
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.servers.pool_slot import PooledServer, PoolSlot
from ops.simulator.world.usage import Use
from ops.simulator.world.world import World

MakePoolSlot = Callable[[SlotAdd, int], PoolSlot]
"""Makes the engine of a pool's slot with so many GPUs, for the first pooled instance there."""


class FleetPools:
    """The pools' slots. `models`: the models that may be pooled, by name."""

    def __init__(self, make: MakePoolSlot, models: Mapping[str, ModelSpec], world: World) -> None:
        self._make = make
        self._models = models
        self._world = world
        self._slots: dict[SlotRef, PoolSlot] = {}
        self._uses: dict[SlotRef, Use] = {}

    def __contains__(self, ref: SlotRef) -> bool:
        """Whether a slot is in a pool."""
        return ref in self._uses

    def start(self, add: SlotAdd, instance_id: str, gpus: int) -> PooledServer:
        """Start a pooled instance on a slot of so many GPUs, which is the pool's from now on. Where the slot's engine
        has the model already, for a draining or dedicated instance, later pooled instances get a new engine.
        """
        ref, model = (add.node_id, add.slot), add.endpoint.model
        if ref not in self:
            of = PoolKey(region=add.endpoint.region, gpu_type=add.gpu_type, worker_gpus=gpus)
            use = self._uses[ref] = Use(of, "pooled", InstanceKind.MIXED, add.gpu_type, gpus)
            self._world.usage.change(None, use, self._world.events.now_s)
        slot = self._slots.get(ref)
        if slot is None or slot.has(model):
            slot = self._slots[ref] = self._make(add, gpus)
            self._world.present.employ(slot.server)
        return slot.add(instance_id, self._models[model], lambda: self.load(add.node_id))

    def end(self, ref: SlotRef) -> None:
        """Take a slot out of its pool, after its last pooled instance."""
        del self._slots[ref]
        self._world.usage.change(self._uses.pop(ref), None, self._world.events.now_s)

    def load(self, node_id: str) -> float:
        """The load of a node's busiest slot in a pool."""
        return max((slot.server.load_alpha for (node, _), slot in self._slots.items() if node == node_id), default=0.0)
