"""How the GPUs of nodes are grouped into slots, where models of one, two or four GPUs share a place (Aegaeon 7.5).

A model of four GPUs needs a slot of four, in which small models would waste three. So the groups follow the demand:
where a size lacks slots, idle ones of other sizes are merged or split into one. A slot has to be emptied for that, so
groups change rarely: a size is given what its models take and no more, gives away only what it does not take even if
it grew by `margin`, and a node that was regrouped stays as it is for `hold_s`. Nobody is robbed: where all sizes lack
slots, the place is full, and that is said.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.policies.facts import RegionGpu
from dataplane.protocol.layouts import Layout, slots_of


@dataclass(frozen=True, kw_only=True)
class GroupedNode:
    """A node whose GPUs may be regrouped.

    Attributes:
        layout: the one that is wanted of it, which it may still be on its way to.
        age_s: for how long it has been wanted.
        work: what it costs to empty the slots that hold anything, by their numbers, in one unit for all nodes.
    """

    name: str
    place: RegionGpu
    layout: Layout
    age_s: float = math.inf
    work: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayoutFacts:
    """The nodes that may be regrouped, and for each place the GPUs that models of each size take, in slots no fuller
    than they may be. Demand 0 means that there are such models, which need one slot; a missing size needs none.
    """

    nodes: tuple[GroupedNode, ...]
    demand: Mapping[RegionGpu, Mapping[int, float]]


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """When to regroup: see the module."""

    margin: float = 0.1
    hold_s: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """A node that is to have another layout, and why."""

    node: str
    place: RegionGpu
    before: Layout
    after: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class LayoutDecision:
    """Nodes to regroup, ordered by name. `missing`: slots of a size that a place lacks and no regrouping gives it."""

    regroupings: tuple[Regrouping, ...] = ()
    missing: Mapping[RegionGpu, Mapping[int, int]] = field(default_factory=dict)


def choose_layouts(facts: LayoutFacts, now_s: float, settings: LayoutSettings) -> LayoutDecision:
    """Give each size the slots that it lacks.

    Args:
        facts: see LayoutFacts. The order of the nodes does not matter.
        now_s: Unix time; ages are in the facts, so it changes nothing.
        settings: see LayoutSettings.
    """
    nodes: dict[RegionGpu, list[GroupedNode]] = defaultdict(list)
    for node in sorted(facts.nodes, key=lambda node: node.name):
        nodes[node.place].append(node)
    regroupings: list[Regrouping] = []
    missing: dict[RegionGpu, Mapping[int, int]] = {}
    for place, demand in sorted(facts.demand.items(), key=lambda item: item[0]):
        place_nodes = _Place(nodes[place], demand, settings)
        if lacks := place_nodes.fill():
            missing[place] = lacks
        regroupings += place_nodes.regroupings()
    return LayoutDecision(regroupings=tuple(sorted(regroupings, key=lambda one: one.node)), missing=missing)


@dataclass(frozen=True, kw_only=True)
class _Move:
    """Slots of a node that may become slots of another size: those from GPU `first` on, `gpus` together."""

    node: str
    first: int
    gpus: int
    taken: Counter[int]
    work: float


class _Place:
    """The nodes of one place while their layouts change."""

    def __init__(self, nodes: Sequence[GroupedNode], demand: Mapping[int, float], settings: LayoutSettings) -> None:
        self._before = {node.name: node for node in nodes}
        self._layouts = {node.name: node.layout for node in nodes}
        self._open = [node.name for node in nodes if node.age_s >= settings.hold_s]
        self._demand = demand
        self._settings = settings
        self._reasons: dict[str, list[str]] = defaultdict(list)

    def fill(self) -> dict[int, int]:
        """Regroup until each size has what it takes; returns how many slots of each are missing. The largest come
        first, since they need GPUs that lie together.
        """
        missing = {}
        for size in sorted(self._demand, reverse=True):
            while (lacks := self._needed(size) - self._have()[size]) > 0:
                if not (moves := list(self._moves(size))):
                    missing[size] = lacks
                    break
                self._apply(size, min(moves, key=lambda move: (move.gpus, move.work, move.node, move.first)))
        return missing

    def regroupings(self) -> Iterator[Regrouping]:
        for name, reasons in self._reasons.items():
            reason = ", ".join(dict.fromkeys(reasons))
            node = self._before[name]
            yield Regrouping(
                node=name,
                place=node.place,
                before=node.layout,
                after=self._layouts[name],
                reason=f"lacking: {reason}",
            )

    def _needed(self, size: int, margin: float = 0.0) -> int:
        """Slots of a size that its models take; none where there are no such models."""
        if size not in self._demand:
            return 0
        return max(1, math.ceil(self._demand[size] * (1 + margin) / size - 1e-9))

    def _have(self) -> Counter[int]:
        return Counter(size for layout in self._layouts.values() for size in layout)

    def _moves(self, size: int) -> Iterator[_Move]:
        """Slots that could become such of this size: smaller ones that lie together, or a larger one."""
        spare = {other: count - self._needed(other, self._settings.margin) for other, count in self._have().items()}
        for name in self._open:
            slots = slots_of(self._layouts[name])
            starts = {first for first, gpus in slots.items() if gpus > size}
            starts |= {first for first in slots if first % size == 0 and slots[first] < size}
            for first in sorted(starts):
                gpus = max(size, slots[first])
                inside = [slot for slot in slots if first <= slot < first + gpus]
                taken = Counter(slots[slot] for slot in inside)
                whole = sum(slots[slot] for slot in inside) == gpus
                if whole and all(count <= spare[other] for other, count in taken.items()):
                    work = sum(self._before[name].work.get(slot, 0.0) for slot in inside)
                    yield _Move(node=name, first=first, gpus=gpus, taken=taken, work=work)

    def _apply(self, size: int, move: _Move) -> None:
        slots = {
            slot: gpus
            for slot, gpus in slots_of(self._layouts[move.node]).items()
            if not move.first <= slot < move.first + move.gpus
        }
        slots |= dict.fromkeys(range(move.first, move.first + move.gpus, size), size)
        self._layouts[move.node] = tuple(gpus for _, gpus in sorted(slots.items()))
        self._reasons[move.node].append(f"slots of {size} GPUs for {self._demand[size]:.2f} GPUs of demand")
