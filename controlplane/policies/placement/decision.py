"""What placement answers: a plan for one hour, every count with its reason and its price."""

from dataclasses import dataclass
from enum import StrEnum

from controlplane.policies.facts import Endpoint, EndpointGpu, PoolKey, RegionGpu


class PlacementStatus(StrEnum):
    """How the solver ended.

    OPTIMAL: within the gap that was asked for, proven. BOUNDED: with a proven bound that is further away, after all the
    work that was allowed. TIME_LIMIT: cut off by the clock before that. FAILED: no answer at all.
    """

    OPTIMAL = "optimal"
    BOUNDED = "bounded"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"


class Constraint(StrEnum):
    """What makes a count necessary: the row that one instance less (or, where it fell, more) would break.

    HOME and GLOBAL are the two demand rows. CAPACITY and MAXIMUM hold a count down. COST: no row needs it, it is
    cheaper so. RESERVE: it is sized together with the reserve that it shares. NONE: nothing needs it; it is kept within
    the solver's gap, or the cell is empty before and after.
    """

    HOME = "home"
    GLOBAL = "global"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    OVERRIDE = "pin"
    CAPACITY = "capacity"
    COST = "cost"
    RESERVE = "reserve"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class PlacementEntry:
    """Instances of an endpoint on a GPU type, before and after, and why.

    Attributes:
        constraint: what makes this count necessary.
        cost_if_not: what the objective rises by, per hour, without this change; see reasons.py. 0 where unchanged.
    """

    endpoint: Endpoint
    gpu_type: str
    before: int
    after: int
    reason: str
    constraint: Constraint = Constraint.NONE
    cost_if_not: float = 0.0

    @property
    def key(self) -> EndpointGpu:
        return EndpointGpu(model=self.endpoint.model, region=self.endpoint.region, gpu_type=self.gpu_type)


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """GPUs of a type in a region that are given to the pool whose workers have so many GPUs, before and after."""

    region: str
    gpu_type: str
    worker_gpus: int = 1
    before: int
    after: int

    @property
    def place(self) -> RegionGpu:
        return RegionGpu(region=self.region, gpu_type=self.gpu_type)

    @property
    def key(self) -> PoolKey:
        return PoolKey(region=self.region, gpu_type=self.gpu_type, worker_gpus=self.worker_gpus)


@dataclass(frozen=True, kw_only=True)
class PooledEndpoint:
    """An endpoint that a pool serves.

    Attributes:
        worker_gpus: of each worker of the pool's slots.
        occupancy: its share of one GPU there.
        before: it was pooled there already.
        cost_if_not: what the objective rises by, per hour, if it is not; 0 where it was before.
    """

    endpoint: Endpoint
    gpu_type: str
    worker_gpus: int = 1
    occupancy: float
    before: bool
    reason: str
    cost_if_not: float = 0.0

    @property
    def key(self) -> EndpointGpu:
        return EndpointGpu(model=self.endpoint.model, region=self.endpoint.region, gpu_type=self.gpu_type)

    @property
    def pool(self) -> PoolKey:
        return self.key.pool(self.worker_gpus)


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """Demand the plan cannot serve: nowhere (`region` None), or not in the region that must serve it at home."""

    model: str
    region: str | None
    tokens_per_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class BelowMinimum:
    """An endpoint that cannot have its minimum of instances."""

    endpoint: Endpoint
    minimum: int
    placed: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A plan for one hour.

    Attributes:
        at_s: the `now_s` it was made at.
        solver: "highs" for the integer program, "prices" for the decomposition, "none" where there was
            nothing to solve or none answered.
        objective_per_hour: GPUs, starts, and prices of what is not served (cost.py). None if it failed.
        bound_per_hour: no plan can be below this; None if it failed.
        gap: (objective - bound) / gpu_cost_per_hour, as a share of 1; None without a bound.
        gpu_cost_per_hour: price of the placed instances and pool GPUs alone.
        entries: every cell with instances before or after, ordered by endpoint and GPU type.
        below_minimum: endpoints that cannot have their minimum or their replica override.
        reason: the solver's message.
        pools: every pool with GPUs before or after.
        pooled: every endpoint pooled after, ordered.
    """

    at_s: float
    status: PlacementStatus
    solver: str
    objective_per_hour: float | None
    bound_per_hour: float | None
    gap: float | None
    gpu_cost_per_hour: float
    entries: tuple[PlacementEntry, ...]
    unserved: tuple[Unserved, ...]
    below_minimum: tuple[BelowMinimum, ...]
    reason: str
    pools: tuple[PoolSize, ...] = ()
    pooled: tuple[PooledEndpoint, ...] = ()
