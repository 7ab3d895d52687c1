"""Pools of mixed parallelism: nodes whose GPUs are grouped into slots, which models of that size share.

Each size has its pool, with a simulated process for every slot that could ever be: those of the present layouts are
open. Now and then the live policy (`choose_layouts`) is asked; what it regroups is drained first, and serves in its new
groups when their processes have started.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from controlplane.policies.assignment.layouts import GroupedNode, LayoutFacts, LayoutSettings, choose_layouts
from controlplane.policies.facts import RegionGpu
from controlplane.policies.placement.pools import PoolLoad, occupancy_of
from dataplane.protocol.layouts import Block, Layout, blocks_between, slots_of
from ops.simulator.kernel.costs import ModelCosts
from ops.simulator.kernel.events import TICK, Events
from ops.simulator.servers.pool import PoolServer


@dataclass(frozen=True, kw_only=True)
class RegroupSettings:
    """How slots are regrouped.

    Attributes:
        layouts: as the policy takes them.
        every_s: how often it is asked.
        window_s: demand is the mean of so long.
        fill: share of a slot's GPUs that may be taken.
        start_s: how long the processes of new slots take to start.
        prompt_tokens, output_tokens: means of a request, as plans take them.
        tbt_s: target for the time between tokens.
    """

    layouts: LayoutSettings = field(default_factory=LayoutSettings)
    every_s: float = 60.0
    window_s: float = 300.0
    fill: float = 0.8
    start_s: float = 15.0
    prompt_tokens: float = 512.0
    output_tokens: float = 256.0
    tbt_s: float = 0.1


def slot_index(node: int, node_gpus: int, first: int, size: int) -> int:
    """The number of a slot in the pool of its size, where each node has room for so many."""
    return node * (node_gpus // size) + first // size


def opened_slots(layouts: Sequence[Layout], size: int) -> frozenset[int]:
    """The slots of a size that are open at the beginning."""
    return frozenset(
        slot_index(node, sum(layout), first, size)
        for node, layout in enumerate(layouts)
        for first, gpus in slots_of(layout).items()
        if gpus == size
    )


class Regrouper:
    """The nodes of one region and GPU type, all of as many GPUs. `pools`: by the size of their slots."""

    def __init__(
        self,
        place: RegionGpu,
        layouts: Sequence[Layout],
        pools: Mapping[int, PoolServer],
        costs: Mapping[int, Sequence[ModelCosts]],
        settings: RegroupSettings,
        events: Events,
    ) -> None:
        """`costs`: of the models of each size."""
        self.regroupings = 0
        self.missing = 0
        """How often a size was found to lack slots that no regrouping could give it."""
        self._place = place
        self._layouts = list(layouts)
        self._changed_s = [float("-inf")] * len(layouts)
        self._moving: Counter[int] = Counter()
        """Blocks of each node that are not regrouped yet; no zeros."""
        self._pools = pools
        self._costs = costs
        self._settings = settings
        self._events = events
        self._submitted: dict[int, deque[Counter[str]]] = defaultdict(
            lambda: deque(maxlen=max(2, round(settings.window_s / settings.every_s) + 1))
        )

    def begin(self) -> None:
        """Ask the policy every `every_s` seconds from then on."""
        for size, pool in self._pools.items():
            self._submitted[size].append(Counter(pool.submitted))
        self._events.at(self._events.now_s + self._settings.every_s, TICK, self._again)

    def _again(self) -> None:
        for size, pool in self._pools.items():
            self._submitted[size].append(Counter(pool.submitted))
        nodes = tuple(
            GroupedNode(
                name=f"{number:04}",
                place=self._place,
                layout=layout,
                age_s=0.0 if self._moving[number] else self._events.now_s - self._changed_s[number],
                work=self._work(number, layout),
            )
            for number, layout in enumerate(self._layouts)
        )
        facts = LayoutFacts(nodes=nodes, demand={self._place: {size: self.demand(size) for size in self._pools}})
        decision = choose_layouts(facts, self._events.now_s, self._settings.layouts)
        self.missing += bool(decision.missing)
        for one in decision.regroupings:
            self._regroup(int(one.node), one.after)
        self._events.at(self._events.now_s + self._settings.every_s, TICK, self._again)

    def demand(self, size: int) -> float:
        """GPUs that the models of a size take, by what arrived in the last `window_s` seconds."""
        settings, seen = self._settings, self._submitted[size]
        window_s = settings.every_s * max(1, len(seen) - 1)
        shares = [
            occupancy_of(self._load(costs, size, (seen[-1][costs.name] - seen[0][costs.name]) / window_s)).total
            for costs in self._costs[size]
        ]
        return sum(shares) / settings.fill

    def _load(self, costs: ModelCosts, size: int, requests_per_s: float) -> PoolLoad:
        settings = self._settings
        return PoolLoad(
            **asdict(costs.latency),
            requests_per_s=requests_per_s,
            input_tokens=settings.prompt_tokens,
            output_tokens=settings.output_tokens,
            switch_s=costs.weights_bytes / costs.bytes_per_s,
            tbt_s=settings.tbt_s,
            gpus=size,
        )

    def _work(self, node: int, layout: Layout) -> dict[int, float]:
        return {
            first: float(self._pools[size].remaining_tokens(slot_index(node, sum(layout), first, size)))
            for first, size in slots_of(layout).items()
        }

    def _regroup(self, node: int, after: Layout) -> None:
        """Drain what changes; each block is regrouped when it is empty."""
        before, self._layouts[node] = self._layouts[node], after
        self._changed_s[node] = self._events.now_s
        self.regroupings += 1
        for block in blocks_between(before, after):
            self._moving[node] += 1
            self._drain(node, block, slots_of(before), slots_of(after))

    def _drain(self, node: int, block: Block, old: Mapping[int, int], new: Mapping[int, int]) -> None:
        left = set(block.going)
        node_gpus = sum(new.values())

        def emptied(slot: int) -> Callable[[], None]:
            def settle() -> None:
                left.remove(slot)
                if not left:
                    self._events.at(self._events.now_s + self._settings.start_s, TICK, started)

            return settle

        def started() -> None:
            self._moving[node] -= 1
            for slot in block.coming:
                self._pools[new[slot]].open_slot(slot_index(node, node_gpus, slot, new[slot]))

        for slot in block.going:
            self._pools[old[slot]].close_slot(slot_index(node, node_gpus, slot, old[slot]), emptied(slot))
