"""The series of a run: one value a step for each endpoint, queue and tier, in memory that grows with the steps only."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from controlplane.policies.facts import Endpoint, InstanceFacts, RegionGpu
from controlplane.policies.routing import utilization_of
from ops.simulator.results.results import EndpointSeries, PoolSeries, QueueSeries, Series, State, TierSeries
from ops.simulator.traffic.demand import Demand
from ops.simulator.world.measures import Block, Histogram
from ops.simulator.world.usage import Usage, Use

STEP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the plan in force says of an endpoint: the demand it counts on at its peak, and instances."""

    forecast: float
    instances: int


@dataclass(kw_only=True)
class _Endpoint:
    """An endpoint's lists. `counts`: by state, and by kind where it serves; short where nothing came later."""

    demand: list[float] = field(default_factory=list)
    forecast: list[float | None] = field(default_factory=list)
    planned: list[int | None] = field(default_factory=list)
    counts: dict[tuple[State, str], list[float]] = field(default_factory=dict)
    utilization: list[float | None] = field(default_factory=list)


class Recorder:
    """Closes a step at a time. `endpoints`: those that are told, from the beginning."""

    def __init__(self, endpoints: Iterable[Endpoint], usage: Usage, demand: Demand) -> None:
        self.planned: Callable[[], Mapping[Endpoint, Planned]] = dict
        self.planned_pools: Callable[[], Mapping[RegionGpu, int]] = dict
        self._start_s = 0.0
        self._steps = 0
        self._usage = usage
        self._demand = demand
        self._endpoints = {endpoint: _Endpoint() for endpoint in sorted(endpoints)}
        self._switches: list[int] = []
        self._gpus: dict[State, list[float]] = {}
        self._pools: dict[RegionGpu, list[tuple[float, int | None]]] = {}
        self._queues: dict[str, list[tuple[int, float]]] = {}
        self._tiers: dict[str, list[tuple[int, float | None]]] = {}
        self._first_tokens: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._before: Mapping[Use, float] = {}

    def begin(self, now_s: float) -> None:
        """Begin the first step, at a whole minute."""
        self._start_s = now_s

    def ended(self, tier: str, block: Block) -> None:
        """Count served requests of a tier."""
        self._first_tokens[tier].add(block.ttft_s)

    def close(
        self,
        now_s: float,
        views: Mapping[str, Mapping[str, InstanceFacts]],
        queues: Mapping[str, tuple[int, float]],
        *,
        switches: int,
    ) -> None:
        """End a step. `queues`: by model, its length and the age of the oldest request; `switches`: so far."""
        self._switches.append(switches)
        seconds = self._usage.seconds(now_s)
        planned = self.planned()
        for endpoint, lists in self._endpoints.items():
            here = [one for one in views.get(endpoint.model, {}).values() if one.endpoint == endpoint]
            plan = planned.get(endpoint)
            lists.demand.append(self._demand.mean(endpoint, since_s=now_s - STEP_S, until_s=now_s))
            lists.forecast.append(None if plan is None else plan.forecast)
            lists.planned.append(None if plan is None else plan.instances)
            lists.utilization.append(utilization_of(here) if here else None)
        self._count(seconds)
        for model in {*self._queues, *queues}:
            lines = self._queues.setdefault(model, [(0, 0.0)] * self._steps)
            lines.append(queues.get(model, (0, 0.0)))
        for tier in {*self._tiers, *self._first_tokens}:
            histogram = self._first_tokens.get(tier, Histogram())
            p95_s = histogram.quantile(0.95)
            rows = self._tiers.setdefault(tier, [(0, None)] * self._steps)
            rows.append((histogram.count, None if math.isnan(p95_s) else p95_s))
        self._first_tokens.clear()
        self._before = seconds
        self._steps += 1

    def _count(self, seconds: Mapping[Use, float]) -> None:
        """Mean counts of instances and GPUs in the step."""
        pools: defaultdict[RegionGpu, float] = defaultdict(float)
        for use, total_s in seconds.items():
            count = (total_s - self._before.get(use, 0.0)) / STEP_S
            self._add(self._gpus.setdefault(use.state, []), count * use.gpus)
            if isinstance(use.endpoint, RegionGpu):
                pools[use.endpoint] += count * use.gpus
            else:
                key = use.state, use.kind.value if use.state == "serving" else ""
                self._add(self._endpoints[use.endpoint].counts.setdefault(key, []), count)
        planned = self.planned_pools()
        for place in {*self._pools, *pools, *planned}:
            self._pools.setdefault(place, [(0.0, None)] * self._steps).append((pools[place], planned.get(place)))

    def _add(self, column: list[float], value: float) -> None:
        """Add to the present step of a list, which is padded with zeros."""
        column += [0.0] * (self._steps + 1 - len(column))
        column[-1] += value

    def series(self) -> Series:
        return Series(
            start_s=self._start_s,
            step_s=STEP_S,
            gpus={state: self._whole(column) for state, column in sorted(self._gpus.items()) if any(column)},
            switches=[after - before for before, after in pairwise([0, *self._switches])],
            endpoints=[self._endpoint(endpoint, lists) for endpoint, lists in self._endpoints.items()],
            pools=[
                PoolSeries(
                    region=place.region,
                    gpu_type=place.gpu_type,
                    gpus=[gpus for gpus, _ in rows],
                    planned=[planned for _, planned in rows],
                )
                for place, rows in sorted(self._pools.items())
            ],
            queues=[
                QueueSeries(model=model, waiting=[waits for waits, _ in lines], age_s=[age_s for _, age_s in lines])
                for model, lines in sorted(self._queues.items())
            ],
            tiers=[
                TierSeries(tier=tier, ended=[count for count, _ in rows], ttft_p95_s=[p95_s for _, p95_s in rows])
                for tier, rows in sorted(self._tiers.items())
            ],
        )

    def _endpoint(self, endpoint: Endpoint, lists: _Endpoint) -> EndpointSeries:
        def counts(state: State, kind: str = "") -> list[float]:
            return self._whole(lists.counts.get((state, kind), []))

        kinds = sorted(kind for state, kind in lists.counts if state == "serving")
        return EndpointSeries(
            model=endpoint.model,
            region=endpoint.region,
            demand=lists.demand,
            forecast=lists.forecast,
            planned=lists.planned,
            serving={kind: counts("serving", kind) for kind in kinds},
            pooled=counts("pooled"),
            warming=counts("warming"),
            draining=counts("draining"),
            spot=counts("spot"),
            utilization=lists.utilization,
        )

    def _whole(self, column: list[float]) -> list[float]:
        return [*column, *[0.0] * (self._steps - len(column))]
