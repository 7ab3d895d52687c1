"""Facts, settings and decisions of the shared reserve."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.policies.facts import Endpoint, EndpointGpu, PoolKey, RegionGpu
from controlplane.policies.placement.error_correlation import PeakErrors
from controlplane.policies.placement.pools import PoolLoad, occupancy_at


@dataclass(frozen=True, kw_only=True)
class ReserveSettings:
    """How reserves are planned.

    Attributes:
        enabled: whether they are.
        quantile: of the sum of what endpoints lack, for which reserves are sized.
        upper_quantile: of the forecasts' upper peaks.
        correlation: of the errors of the peaks' forecasts, between any two endpoints, as far as past ones say nothing.
        fill: share of a slot's GPUs that may be taken.
        epsilon: share of an endpoint's peak that its own region must be able to serve.

    Raises:
        ValueError: a field is out of range.
    """

    enabled: bool = False
    quantile: float = 0.9
    upper_quantile: float = 0.9
    correlation: float = 0.2
    fill: float = 0.8
    epsilon: float = 0.8

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0.5 <= self.quantile < 1:
            raise ValueError(f"reserve.quantile must be at least 0.5 and below 1, got {self.quantile}")
        if not 0.5 < self.upper_quantile < 1:
            raise ValueError(f"reserve.upper_quantile must lie between 0.5 and 1, got {self.upper_quantile}")
        if not 0 < self.fill <= 1:
            raise ValueError(f"reserve.fill must be above 0 and at most 1, got {self.fill}")
        for name in ("correlation", "epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"reserve.{name} must be between 0 and 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ReserveEndpoint:
    """An endpoint that a reserve can hold, and its demand in the coming hour in input tokens/s.

    Attributes:
        key: the endpoint, and the GPU type of its reserve.
        median, upper: of its peak; the upper one at the forecasts' quantile.
        tokens_per_s: what one instance serves at its SLO (theta). gpus: of one instance.
        load: its latency model and its mean request; the rate does not matter.
        fewest, most: instances that it may have.
    """

    key: EndpointGpu
    median: float
    upper: float
    tokens_per_s: float
    gpus: int
    load: PoolLoad
    fewest: int = 0
    most: int = 1_000_000

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: one is out of range.
        """
        where = f"reserve.endpoints[{self.key.model} in {self.key.region} on {self.key.gpu_type}]"
        if not 0 <= self.median <= self.upper < math.inf:
            raise ValueError(f"{where}: need 0 <= median <= upper, got {self.median} and {self.upper}")
        if not (0 < self.tokens_per_s < math.inf and self.gpus >= 1):
            raise ValueError(f"{where}: need tokens_per_s > 0 and gpus >= 1, got {self.tokens_per_s} and {self.gpus}")
        if not 0 <= self.fewest <= self.most:
            raise ValueError(f"{where}: need 0 <= fewest <= most, got {self.fewest} and {self.most}")

    def share(self, tokens_per_s: float) -> float:
        """GPUs of a pool that so much of its demand takes: at least what its instances would need."""
        if tokens_per_s <= 0:
            return 0.0
        taken = occupancy_at(self.load, tokens_per_s / self.load.input_tokens).total
        return max(taken, self.gpus * tokens_per_s / self.tokens_per_s)

    @property
    def alone(self) -> int:
        """Instances without a reserve: for its upper peak, and its fewest."""
        return min(self.most, max(math.ceil(self.upper / self.tokens_per_s - 1e-9), self.fewest))


@dataclass(frozen=True, kw_only=True)
class ReservePlace:
    """Where a reserve can be: GPUs of a slot and of each of its workers, and those that nothing but the reserve and the
    own instances of its endpoints may take. `most_gpus`: of slots of its size, which the instances need not have; None:
    as many. `present_gpus`: of its slots now.
    """

    slot_gpus: int
    free_gpus: int
    worker_gpus: int = 1
    most_gpus: int | None = None
    present_gpus: int = 0

    def slots_beside(self, own_gpus: int) -> int:
        """Slots that the reserve may have where own instances take so many GPUs."""
        free = self.free_gpus - own_gpus
        return max(0, free if self.most_gpus is None else min(free, self.most_gpus)) // self.slot_gpus


@dataclass(frozen=True, kw_only=True)
class ReserveFacts:
    """Endpoints that reserves can hold, and where. `left_out`: why others cannot be held. `errors`: of past
    forecasts.
    """

    endpoints: tuple[ReserveEndpoint, ...]
    places: Mapping[RegionGpu, ReservePlace]
    left_out: Mapping[Endpoint, str] = field(default_factory=dict)
    errors: PeakErrors = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReservedEndpoint:
    """An endpoint that the reserve of its region holds, with an instance on each of its slots. `instances`: of its own
    on the GPU type of `key`, `gpus` each.
    """

    key: EndpointGpu
    instances: int
    gpus: int
    reason: str

    @property
    def pool(self) -> PoolKey:
        return self.key.pool(self.gpus)


@dataclass(frozen=True, kw_only=True)
class ReserveSize:
    """The reserve of a region on one GPU type.

    Attributes:
        gpus: of its slots, which it takes whole. slot_gpus: of one of them; worker_gpus: of each worker there.
        missing_gpus: what it should have more, for which there is no capacity.
    """

    place: RegionGpu
    gpus: int
    slot_gpus: int
    missing_gpus: int
    reason: str
    worker_gpus: int = 1

    @property
    def pool(self) -> PoolKey:
        return PoolKey(region=self.place.region, gpu_type=self.place.gpu_type, worker_gpus=self.worker_gpus)

    @property
    def slots(self) -> int:
        return self.gpus // self.slot_gpus


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """The reserves of a fleet: sizes where there are or should be any slots, endpoints ordered by key."""

    sizes: tuple[ReserveSize, ...] = ()
    endpoints: tuple[ReservedEndpoint, ...] = ()
    left_out: Mapping[Endpoint, str] = field(default_factory=dict)

    @property
    def held(self) -> frozenset[EndpointGpu]:
        """Where endpoints are held, whether their reserve has slots in this hour or not."""
        return frozenset(each.key for each in self.endpoints)

    @property
    def gpus(self) -> Mapping[PoolKey, int]:
        """GPUs by pool, of reserves that have any."""
        return {size.pool: size.gpus for size in self.sizes if size.gpus}
