"""The slots of a simulated fleet, and how plans regroup the nodes that allow it.

As in the live service, a slot that goes takes nothing new, and the GPUs of a block are regrouped once all its slots are
empty. The worker processes of new slots take no time to start here: an instance that starts there takes minutes.
"""

import math
from collections.abc import Collection, Iterable

from controlplane.policies.assignment.facts import SlotRef
from controlplane.policies.facts import NodeFacts, NodeSlot
from controlplane.policies.fit import WeightsMemory
from dataplane.protocol.layouts import Layout, advanced, going_slots, slots_of
from ops.simulator.world.hosted import FleetNode


class FleetLayouts:
    """The slots of all nodes. `patience_s`: how long slots that go keep instances that have no place elsewhere."""

    def __init__(self, nodes: Iterable[FleetNode], patience_s: float) -> None:
        self.regrouped = 0
        """How often a node was to be regrouped."""
        self._slots = {node.name: node.slots for node in nodes}
        self._wanted: dict[str, Layout] = {}
        """Of the nodes that are not grouped as is wanted."""
        self._chosen_s: dict[str, float] = {}
        self._patience_s = patience_s
        self._settled: dict[str, NodeFacts] = {}
        """The last facts of nodes that no plan has regrouped, by name: until they age, they stay as they are."""

    @property
    def count(self) -> int:
        """All slots."""
        return sum(map(len, self._slots.values()))

    def gpus_of(self, ref: SlotRef) -> int:
        """GPUs of a slot; 0 where it is no more."""
        name, number = ref
        return self._slots[name].get(number, 0)

    def facts(self, node: FleetNode, now_s: float, *, age_s: float) -> NodeFacts:
        """A node for the snapshot. `age_s`: for how long it has been silent."""
        if node.name in self._chosen_s:
            return self._facts(node, now_s, age_s)
        known = self._settled.get(node.name)
        if known is None or known.age_s != age_s:
            known = self._settled[node.name] = self._facts(node, now_s, age_s)
        return known

    def _facts(self, node: FleetNode, now_s: float, age_s: float) -> NodeFacts:
        going = self.going(node.name)
        return NodeFacts(
            name=node.name,
            region=node.region,
            gpu_type=node.gpu_type,
            slots=tuple(
                NodeSlot(number=number, gpus=gpus, going=number in going, weights=_memory(node, gpus))
                for number, gpus in self._slots[node.name].items()
            ),
            host_bytes=node.host_bytes,
            age_s=age_s,
            regroups=node.regroups,
            layout=self._wanted.get(node.name),
            layout_age_s=now_s - self._chosen_s.get(node.name, -math.inf),
        )

    def going(self, name: str) -> frozenset[int]:
        """Slots of a node that are to be regrouped."""
        wanted = self._wanted.get(name)
        return frozenset() if wanted is None else going_slots(self._present(name), wanted)

    def is_overdue(self, name: str, now_s: float) -> bool:
        """Whether the slots of a node that go have waited for their instances long enough."""
        return name in self._wanted and now_s - self._chosen_s[name] > self._patience_s

    def want(self, name: str, layout: Layout, now_s: float) -> None:
        """Have a node's GPUs grouped like that; `regroup` brings it about."""
        self.regrouped += 1
        self._chosen_s[name] = now_s
        self._wanted[name] = layout

    def regroup(self, held: Collection[SlotRef]) -> None:
        """Replace the slots of blocks that are empty. `held`: the slots that hold instances."""
        for name, wanted in list(self._wanted.items()):
            busy = {number for node, number in held if node == name}
            after = advanced(self._present(name), wanted, busy)
            self._slots[name] = slots_of(after)
            if after == wanted:
                del self._wanted[name]

    def _present(self, name: str) -> Layout:
        return tuple(self._slots[name].values())


def _memory(node: FleetNode, gpus: int) -> WeightsMemory:
    """Memory for weights of a slot of so many GPUs."""
    return WeightsMemory(weights_bytes=None if node.weights_bytes is None else node.weights_bytes * gpus)
