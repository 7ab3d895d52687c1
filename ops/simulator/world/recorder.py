"""The series of a run: one value per step for each endpoint, queue and tier; memory grows with the steps only."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from controlplane.policies.facts import Endpoint, InstanceFacts, PoolKey
from controlplane.policies.routing import utilization_of
from ops.simulator.results.results import EndpointSeries, PoolSeries, QueueSeries, Series, State, TierSeries
from ops.simulator.traffic.demand import Demand
from ops.simulator.world.measures import Block, Histogram
from ops.simulator.world.usage import Usage, Use

STEP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan in force for an endpoint: the demand that it expects at its peak, and instances."""

    forecast: float
    instances: int


class Recorder:
    """Records a step at a time. `endpoints`: all those recorded."""

    def __init__(self, endpoints: Iterable[Endpoint], usage: Usage, demand: Demand) -> None:
        self.planned: Callable[[], Mapping[Endpoint, Planned]] = dict
        self.planned_pools: Callable[[], Mapping[PoolKey, int]] = dict
        self._start_s = 0.0
        self._steps = 0
        self._usage = usage
        self._demand = demand
        self._endpoints = {endpoint: _empty_series(endpoint) for endpoint in sorted(endpoints)}
        self._switches: list[int] = []
        self._gpus: dict[State, list[float]] = {}
        self._pools: dict[PoolKey, PoolSeries] = {}
        self._queues: dict[str, QueueSeries] = {}
        self._tiers: dict[str, TierSeries] = {}
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
        for endpoint, series in self._endpoints.items():
            here = [one for one in views.get(endpoint.model, {}).values() if one.endpoint == endpoint]
            plan = planned.get(endpoint)
            series.demand.append(self._demand.mean(endpoint, since_s=now_s - STEP_S, until_s=now_s))
            series.forecast.append(None if plan is None else plan.forecast)
            series.planned.append(None if plan is None else plan.instances)
            series.utilization.append(utilization_of(here) if here else None)
        self._count(seconds)
        for model in queues.keys() - self._queues.keys():
            self._queues[model] = QueueSeries(model=model, waiting=[0] * self._steps, age_s=[0.0] * self._steps)
        for model, queue in self._queues.items():
            waiting, age_s = queues.get(model, (0, 0.0))
            queue.waiting.append(waiting)
            queue.age_s.append(age_s)
        for tier in self._first_tokens.keys() - self._tiers.keys():
            self._tiers[tier] = TierSeries(tier=tier, ended=[0] * self._steps, ttft_p95_s=[None] * self._steps)
        for tier, row in self._tiers.items():
            histogram = self._first_tokens.get(tier, Histogram())
            p95_s = histogram.quantile(0.95)
            row.ended.append(histogram.count)
            row.ttft_p95_s.append(None if math.isnan(p95_s) else p95_s)
        self._first_tokens.clear()
        self._before = seconds
        self._steps += 1

    def _count(self, seconds: Mapping[Use, float]) -> None:
        """Mean counts of instances and GPUs in the step."""
        pools: defaultdict[PoolKey, float] = defaultdict(float)
        for use, total_s in seconds.items():
            count = (total_s - self._before.get(use, 0.0)) / STEP_S
            self._add(self._gpus.setdefault(use.state, []), count * use.gpus)
            if isinstance(use.endpoint, PoolKey):
                pools[use.endpoint] += count * use.gpus
            else:
                own = self._endpoints[use.endpoint]
                serving = use.state == "serving"
                self._add(own.serving.setdefault(use.kind.value, []) if serving else getattr(own, use.state), count)
        planned = self.planned_pools()
        for key in (pools.keys() | planned.keys()) - self._pools.keys():
            self._pools[key] = PoolSeries(
                region=key.region,
                gpu_type=key.gpu_type,
                worker_gpus=key.worker_gpus,
                gpus=[0.0] * self._steps,
                planned=[None] * self._steps,
            )
        for key, pool in self._pools.items():
            pool.gpus.append(pools[key])
            pool.planned.append(planned.get(key))

    def _add(self, column: list[float], value: float) -> None:
        """Add to the present step of a list, which is padded with zeros."""
        _pad(column, self._steps + 1)
        column[-1] += value

    def series(self) -> Series:
        endpoints = list(self._endpoints.values())
        kinds = [column for one in endpoints for column in one.serving.values()]
        for one in endpoints:
            kinds += [one.pooled, one.warming, one.draining, one.spot]
        for column in (*kinds, *self._gpus.values()):
            _pad(column, self._steps)
        return Series(
            start_s=self._start_s,
            step_s=STEP_S,
            gpus={state: column for state, column in sorted(self._gpus.items()) if any(column)},
            switches=[after - before for before, after in pairwise([0, *self._switches])],
            endpoints=endpoints,
            pools=[pool for _, pool in sorted(self._pools.items())],
            queues=[queue for _, queue in sorted(self._queues.items())],
            tiers=[tier for _, tier in sorted(self._tiers.items())],
        )


def _empty_series(endpoint: Endpoint) -> EndpointSeries:
    return EndpointSeries(
        model=endpoint.model, region=endpoint.region, demand=[], forecast=[], planned=[], serving={}, pooled=[],
        warming=[], draining=[], spot=[], utilization=[],
    )  # fmt: skip


def _pad(column: list[float], length: int) -> None:
    column += [0.0] * (length - len(column))
