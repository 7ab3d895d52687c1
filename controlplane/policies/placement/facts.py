"""Facts and settings of the placement. They are checked when they are made; an error names field and limit."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from dataplane.protocol.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """Seconds to start one instance, by what it starts from (SageServe 4 and 7.1).

    Attributes:
        local_s: fresh, with the weights in the region.
        remote_s: fresh, without them.
        donated_same_s: a donated instance of the same model, reclaimed.
        donated_other_s: a donated instance of another model redeployed, with the weights in the region; else
            `remote_s`.

    Raises:
        ValueError: a time is negative or not finite.
    """

    local_s: float = 600.0
    remote_s: float = 7200.0
    donated_same_s: float = 60.0
    donated_other_s: float = 600.0

    def __post_init__(self) -> None:
        """Check the times."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"start.{each.name} must be finite and not negative, got {value}")

    @classmethod
    def of_load(cls, load_time_s: float) -> "StartTimes":
        """The times of an instance that loads in `load_time_s` from weights in its region."""
        return cls(
            local_s=load_time_s,
            remote_s=12 * load_time_s,
            donated_same_s=min(60.0, load_time_s),
            donated_other_s=load_time_s,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a GPU type: input tokens/s of one instance at its SLO, its GPUs, and how long it takes to start."""

    tokens_per_s: float
    gpus: int
    start: StartTimes = StartTimes()


@dataclass(frozen=True, kw_only=True, order=True)
class PlacementModel:
    """A model, and the strictest tier it serves: that sets what unserved demand of it costs."""

    name: str
    tier: Tier = Tier.IW_F


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    """What pools can take, by region and GPU type. Names are checked with the fleet's, in PlacementFacts.

    Attributes:
        occupancy: share of one GPU that an endpoint takes when pooled there; a missing key cannot be pooled there.
        weights_bytes: by model; for every model in `occupancy`.
        host_bytes_per_gpu: by GPU type, host memory for weights per pool GPU; 0 where missing.
        fill: share of a pool's GPUs that occupancies may add up to (eta).
        worker_gpus: GPUs of each worker of the slots that a model is pooled on; 1 where missing.
        slot_gpus: GPUs of a slot, of which a pool takes whole ones only; those of a worker where missing.
        most: GPUs that a pool may have; where missing, all of its region and GPU type.
        present: pool GPUs now.
        pooled: endpoints pooled now.

    Raises:
        ValueError: a number out of range, or a model without its weights' size.
    """

    occupancy: Mapping[EndpointGpu, float]
    weights_bytes: Mapping[str, int]
    host_bytes_per_gpu: Mapping[str, int]
    fill: float = 0.8
    worker_gpus: Mapping[ModelGpu, int] = field(default_factory=dict)
    slot_gpus: Mapping[PoolKey, int] = field(default_factory=dict)
    most: Mapping[PoolKey, int] = field(default_factory=dict)
    present: Mapping[PoolKey, int] = field(default_factory=dict)
    pooled: frozenset[EndpointGpu] = frozenset()

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.fill <= 1:
            raise ValueError(f"pool.fill must be above 0 and at most 1, got {self.fill}")
        for key, share in self.occupancy.items():
            if not 0 < share < math.inf:
                raise ValueError(f"pool.occupancy[{_at(key)}] must be finite and above 0, got {share}")
            if key.model not in self.weights_bytes:
                raise ValueError(f"pool.weights_bytes lacks {key.model!r}, which pool.occupancy names")
        for name, sizes in (("weights_bytes", self.weights_bytes), ("host_bytes_per_gpu", self.host_bytes_per_gpu)):
            for word, size in sizes.items():
                if size < 0:
                    raise ValueError(f"pool.{name}[{word}] must not be negative, got {size}")
        self._check_pools()

    def _check_pools(self) -> None:
        for pair, gpus in self.worker_gpus.items():
            if gpus < 1:
                raise ValueError(f"pool.worker_gpus[{pair.model} on {pair.gpu_type}] must be above 0, got {gpus}")
        for pool, gpus in self.slot_gpus.items():
            if gpus < 1:
                raise ValueError(f"pool.slot_gpus[{pool.gpu_type} in {pool.region}] must be above 0, got {gpus}")
        for name, counts in (("most", self.most), ("present", self.present)):
            for pool, gpus in counts.items():
                if gpus < 0:
                    raise ValueError(f"pool.{name}[{pool.gpu_type} in {pool.region}] must not be negative, got {gpus}")

    def pool(self, key: EndpointGpu) -> PoolKey:
        """The pool that an endpoint would be in."""
        return key.pool(self.worker_gpus.get(key.pair, 1))


@dataclass(frozen=True, kw_only=True)
class PlacementFacts:
    """The fleet and the coming hour. A key that is missing means none, zero, or no limit.

    Attributes:
        capacity: GPUs in a region, in use or not (V_jk).
        profiles: only these pairs of model and GPU type can be placed (theta_ik, g_ik).
        present: instances there now (n_ijk).
        demand: input tokens per second for each window of the coming hour (rho_ij(w)); all of one length.
        limits: fewest and most instances of an endpoint over all GPU types.
        gpu_cost_per_hour: price of one GPU, for each GPU type in `capacity`.
        weights_present: endpoints whose region holds the model's weights.
        donated: donated instances: they hold GPUs of the region, but are free to take.
        overrides: replica overrides: exactly so many instances of an endpoint, whatever `limits` says, and no pool.
        pool: None = no pools.
        unfit: where a model's weights fit on no slot, and why; nothing new is placed there.

    Raises:
        ValueError: an unknown name, a negative number, min above max, or windows of different length.
    """

    regions: tuple[str, ...]
    models: tuple[PlacementModel, ...]
    capacity: Mapping[RegionGpu, int]
    profiles: Mapping[ModelGpu, Profile]
    present: Mapping[EndpointGpu, int]
    demand: Mapping[Endpoint, tuple[float, ...]]
    limits: Mapping[Endpoint, tuple[int, int]]
    gpu_cost_per_hour: Mapping[str, float]
    weights_present: frozenset[Endpoint] = frozenset()
    donated: Mapping[EndpointGpu, int] = field(default_factory=dict)
    overrides: Mapping[Endpoint, int] = field(default_factory=dict)
    pool: PoolFacts | None = None
    unfit: Mapping[EndpointGpu, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_names()
        self._check_fleet()
        self._check_demand()
        for endpoint, (fewest, most) in self.limits.items():
            if not 0 <= fewest <= most:
                raise ValueError(f"limits[{_of(endpoint)}]: need 0 <= min <= max, got min {fewest}, max {most}")
        for endpoint, override in self.overrides.items():
            if override < 0:
                raise ValueError(f"pins[{_of(endpoint)}] must not be negative, got {override}")

    def _check_names(self) -> None:
        models = [model.name for model in self.models]
        _require_distinct("regions", self.regions)
        _require_distinct("models", models)
        known = {"model": set(models), "region": set(self.regions), "gpu_type": set(self.gpu_cost_per_hour)}
        words = {"model": "model", "region": "region", "gpu_type": "gpu_type (priced in gpu_cost_per_hour)"}
        for key in self.profiles:
            _require_known("profiles model", key.model, known["model"])
        named: list[tuple[str, Iterable[Endpoint | EndpointGpu | RegionGpu]]] = [
            ("capacity", self.capacity),
            ("present", self.present),
            ("spot", self.donated),
            ("demand", self.demand),
            ("limits", self.limits),
            ("pins", self.overrides),
            ("weights_present", sorted(self.weights_present)),
            ("unfit", self.unfit),
        ]
        if self.pool is not None:
            named += [
                ("pool.occupancy", self.pool.occupancy),
                ("pool.slot_gpus", [pool.place for pool in self.pool.slot_gpus]),
                ("pool.most", [pool.place for pool in self.pool.most]),
                ("pool.present", [pool.place for pool in self.pool.present]),
                ("pool.pooled", sorted(self.pool.pooled)),
            ]
        for name, keys in named:
            for at in keys:
                for part in at.__struct_fields__:
                    _require_known(f"{name} {words[part]}", getattr(at, part), known[part])
        for name, counts in (("present", self.present), ("spot", self.donated)):
            for cell, count in counts.items():
                if count and cell.pair not in self.profiles:
                    raise ValueError(f"{name}: {cell.model} on {cell.gpu_type} has no profile")

    def _check_fleet(self) -> None:
        counted = (
            ("capacity", self.capacity.values()),
            ("present", self.present.values()),
            ("spot", self.donated.values()),
        )
        for name, counts in counted:
            if any(count < 0 for count in counts):
                raise ValueError(f"{name} must not be negative, got {min(counts)}")
        if any(not 0 <= cost < math.inf for cost in self.gpu_cost_per_hour.values()):
            raise ValueError("gpu_cost_per_hour must be finite and not negative")
        for key, profile in self.profiles.items():
            if not (0 < profile.tokens_per_s < math.inf and profile.gpus >= 1):
                raise ValueError(f"profiles[{key.model} on {key.gpu_type}]: need tokens_per_s > 0, gpus >= 1")

    def _check_demand(self) -> None:
        lengths = {len(windows) for windows in self.demand.values()}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(f"demand: all endpoints need the same number of windows, got {sorted(lengths)}")
        for endpoint, windows in self.demand.items():
            if any(not 0 <= value < math.inf for value in windows):
                raise ValueError(f"demand[{_of(endpoint)}] must be finite and not negative, got {min(windows)}")

    def limits_of(self, endpoint: Endpoint) -> tuple[int, int | None]:
        """Fewest and most instances; a replica override is both; None = no limit."""
        if (override := self.overrides.get(endpoint)) is not None:
            return override, override
        return self.limits.get(endpoint, (0, None))

    def demand_of(self, endpoint: Endpoint) -> tuple[float, ...]:
        """Demand per window; zeros where none is given."""
        windows = len(next(iter(self.demand.values()), (0.0,)))
        return self.demand.get(endpoint, (0.0,) * windows)

    def peak_of(self, endpoint: Endpoint) -> float:
        """The endpoint's largest window."""
        return max(self.demand_of(endpoint))

    def busiest_window_of(self, model: str) -> int:
        """The window in which the model's demand over all regions is largest; the first of equals."""
        totals = self._totals_of(model)
        return totals.index(max(totals))

    def global_peak_of(self, model: str) -> float:
        """The model's demand over all regions in its busiest window."""
        return max(self._totals_of(model))

    def _totals_of(self, model: str) -> list[float]:
        demands = [self.demand_of(Endpoint(model=model, region=region)) for region in sorted(self.regions)]
        return [math.fsum(window) for window in zip(*demands, strict=True)] or [0.0]


def _unserved_ratios() -> Mapping[Tier, float]:
    return {Tier.IW_F: 1000.0, Tier.IW_N: 500.0, Tier.NIW: 100.0}


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """How to place. The ratios price soft constraints, so that every problem is feasible.

    Attributes:
        epsilon: share of an endpoint's peak that its own region must be able to serve.
        time_limit_s: seconds to solve in. The integer program gets a share of them, as a bound of work first
            (`exact/solve.py`), so that the search by prices after it has time.
        gap: proven distance to the optimum that will do, as a share of what serving the demand must cost at least.
        unserved_ratios: price of a token per second not served, in the dearest price of one served. Demand that may
            be served, but not at home, costs half of it.
        minimum_ratio: price of an instance below the minimum, in the dearest price of an instance.
        override_ratio: price of an instance below a replica override, in the most that its GPUs could save elsewhere;
            above 1.5 an override comes before all demand.
        move_ratio: price of a start or stop in the cheapest price of an instance; it only breaks ties.
        exact_cells_max: with more cells and ways to pool than this, prices solve it, not one integer program.
    """

    epsilon: float = 0.8
    time_limit_s: float = 30.0
    gap: float = 0.001
    unserved_ratios: Mapping[Tier, float] = field(default_factory=_unserved_ratios)
    minimum_ratio: float = 50.0
    override_ratio: float = 2.0
    move_ratio: float = 1e-3
    exact_cells_max: int = 500

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a field is out of range.
        """
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must be between 0 and 1, got {self.epsilon}")
        if not (self.time_limit_s > 0 and 0 <= self.gap < 1):
            raise ValueError(f"need time_limit_s > 0 and 0 <= gap < 1, got {self.time_limit_s} and {self.gap}")
        if set(self.unserved_ratios) != set(Tier):
            raise ValueError(f"unserved_ratios must name every tier, got {sorted(self.unserved_ratios)}")


def _of(endpoint: Endpoint) -> str:
    return f"{endpoint.model} in {endpoint.region}"


def _at(key: EndpointGpu) -> str:
    return f"{key.model} in {key.region} on {key.gpu_type}"


def _require_distinct(name: str, words: Iterable[str]) -> None:
    ordered = sorted(words)
    if len(set(ordered)) != len(ordered):
        raise ValueError(f"{name} must not name anything twice, got {ordered}")


def _require_known(name: str, word: str, known: set[str]) -> None:
    if word not in known:
        raise ValueError(f"{name} {word!r} is unknown; known: {', '.join(sorted(known)) or 'none'}")
