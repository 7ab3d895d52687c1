"""The layouts that the plan of an hour gives to nodes: slots of the sizes that its placement takes.

A plan counts GPUs, whatever slots they are grouped into. So when it has placed everything, `choose_layouts` is asked
whether there are slots for it: those of four that an evening's large model takes are made of the ones that the small
models of the day leave. Instances in plans are whole slots and follow an upper quantile of demand, so that no size
keeps more than that; a node that was regrouped stays as it is for longer than a plan lasts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.assignment.layouts import (
    GroupedNode,
    LayoutDecision,
    LayoutFacts,
    LayoutSettings,
    choose_layouts,
)
from controlplane.policies.facts import NodeFacts, PoolKey, RegionGpu
from controlplane.policies.placement.decision import Placement
from controlplane.policies.snapshot import FleetSnapshot


@dataclass(frozen=True, kw_only=True)
class PlannedLayoutSettings:
    """Whether plans write layouts. `hold_s`: how long a node keeps the one that it was given."""

    enabled: bool = False
    hold_s: float = 5400.0


@dataclass(frozen=True, kw_only=True)
class PlannedLayouts:
    """The layouts of a plan. `demand`: GPUs by the size of their slots that it takes in each place."""

    decision: LayoutDecision = field(default_factory=LayoutDecision)
    demand: Mapping[RegionGpu, Mapping[int, float]] = field(default_factory=dict)

    def summary(self) -> str:
        """The slots that are missing, in short; empty where none is."""
        lacks = (
            f"{count} of {size} GPUs on {place.gpu_type} in {place.region}"
            for place, sizes in sorted(self.decision.missing.items(), key=lambda item: item[0])
            for size, count in sorted(sizes.items())
        )
        missing = ", ".join(lacks)
        return f"slots are missing that no node can be regrouped into: {missing}" if missing else ""


@dataclass(frozen=True, kw_only=True)
class PlacedHour:
    """What a plan places. `pool_gpus`: of its pools and reserves."""

    placement: Placement
    pool_gpus: Mapping[PoolKey, int] = field(default_factory=dict)


def plan_layouts(
    snapshot: FleetSnapshot, placed: PlacedHour, now_s: float, settings: PlannedLayoutSettings, *, stale_s: float
) -> PlannedLayouts:
    """Choose the layouts for what is placed.

    Args:
        snapshot: the fleet that it was made for.
        placed: see `PlacedHour`.
        now_s: Unix time, only passed on.
        settings: see `PlannedLayoutSettings`.
        stale_s: a node silent for longer does not count, and keeps its layout.
    """
    if not settings.enabled:
        return PlannedLayouts()
    taken = taken_gpus(snapshot, placed)
    work = _work(snapshot.instances, placed.placement)
    nodes = snapshot.serving_nodes(stale_s)
    lasting: defaultdict[RegionGpu, Counter[int]] = defaultdict(Counter)
    for node in nodes:
        if not node.regroups:
            lasting[node.place].update(node.wanted_layout)
    beyond = {place: _in_slots(_beyond(sizes, lasting[place])) for place, sizes in taken.items()}
    facts = LayoutFacts(nodes=tuple(_grouped(node, work[node.name]) for node in nodes if node.regroups), demand=beyond)
    return PlannedLayouts(
        decision=choose_layouts(facts, now_s, LayoutSettings(margin=0.0, hold_s=settings.hold_s)),
        demand={place: _in_slots(sizes) for place, sizes in taken.items()},
    )


def taken_gpus(snapshot: FleetSnapshot, placed: PlacedHour) -> dict[RegionGpu, dict[int, float]]:
    """GPUs that are taken, by place and by the GPUs of one instance."""
    taken: defaultdict[RegionGpu, Counter[int]] = defaultdict(Counter)
    for entry in placed.placement.entries:
        if entry.after:
            size = snapshot.gpus[entry.key.pair]
            taken[entry.key.place][size] += entry.after * size
    for pool, gpus in placed.pool_gpus.items():
        if gpus:
            taken[pool.place][pool.worker_gpus] += gpus
    return {place: {size: float(gpus) for size, gpus in sorted(sizes.items())} for place, sizes in taken.items()}


def _beyond(sizes: Mapping[int, float], lasting: Mapping[int, int]) -> dict[int, float]:
    """What finds no room in the slots that stay as they are, which several instances may share: the largest instances
    come first, each into the smallest room. `lasting`: how many such slots there are of each size.
    """
    rooms = Counter(lasting)
    beyond: dict[int, float] = {}
    for size, gpus in sorted(sizes.items(), reverse=True):
        left = math.ceil(gpus / size)
        while left and (room := min((one for one, count in rooms.items() if count and one >= size), default=0)):
            rooms[room] -= 1
            rooms[room - size] += 1
            left -= 1
        if left:
            beyond[size] = float(left * size)
    return beyond


def _in_slots(sizes: Mapping[int, float]) -> dict[int, float]:
    """GPUs of the slots that are made for this: an instance of three takes a slot of four."""
    slots: Counter[int] = Counter()
    for size, gpus in sizes.items():
        of_slot = 1 << (size - 1).bit_length()
        slots[of_slot] += of_slot * math.ceil(gpus / size)
    return {size: float(gpus) for size, gpus in sorted(slots.items())}


def _grouped(node: NodeFacts, work: Mapping[int, float]) -> GroupedNode:
    return GroupedNode(
        name=node.name,
        place=node.place,
        layout=node.wanted_layout,
        age_s=node.layout_age_s,
        work=work,
    )


def _work(instances: Iterable[PlacedInstance], placement: Placement) -> defaultdict[str, defaultdict[int, float]]:
    """What it costs to empty each slot, by node: GPUs of instances there, one of a pooled one. One that the plan may
    let go, or that nobody leases, counts half, one that drains nothing.
    """
    spare = {entry.key for entry in placement.entries if entry.after < entry.before}
    work: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for each in instances:
        if each.leased or (each.serving and each.key not in spare):
            work[each.node_id][each.slot] += max(1, each.gpus)
        elif not each.draining:
            work[each.node_id][each.slot] += 0.5 * max(1, each.gpus)
    return work
