"""What placement is told, how it is set, and what it answers. Checked when made; an error names field and limit."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu, Tier


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a GPU type: input tokens/s of one instance at its SLO, its GPUs, its start from local weights."""

    tokens_per_s: float
    gpus: int
    load_time_s: float = 600.0


@dataclass(frozen=True, kw_only=True, order=True)
class PlacementModel:
    """A model, and the strictest tier it serves: that sets what unserved demand of it costs."""

    name: str
    tier: Tier = Tier.IW_F


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

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_names()
        self._check_fleet()
        self._check_demand()
        for endpoint, (fewest, most) in self.limits.items():
            if not 0 <= fewest <= most:
                raise ValueError(f"limits[{_of(endpoint)}]: need 0 <= min <= max, got min {fewest}, max {most}")

    def _check_names(self) -> None:
        models = [model.name for model in self.models]
        gpu_types = set(self.gpu_cost_per_hour)
        _require_distinct("regions", self.regions)
        _require_distinct("models", models)
        endpoints = [
            *(("present", Endpoint(model=key.model, region=key.region)) for key in self.present),
            *(("demand", key) for key in self.demand),
            *(("limits", key) for key in self.limits),
            *(("weights_present", key) for key in self.weights_present),
        ]
        for name, endpoint in endpoints:
            _require_known(f"{name} model", endpoint.model, models)
            _require_known(f"{name} region", endpoint.region, self.regions)
        for place in self.capacity:
            _require_known("capacity region", place.region, self.regions)
            _require_known("capacity gpu_type (priced in gpu_cost_per_hour)", place.gpu_type, gpu_types)
        for key in self.profiles:
            _require_known("profiles model", key.model, models)
        for cell, count in self.present.items():
            if count and ModelGpu(model=cell.model, gpu_type=cell.gpu_type) not in self.profiles:
                raise ValueError(f"present: {cell.model} on {cell.gpu_type} has no profile")
            _require_known("present gpu_type (priced in gpu_cost_per_hour)", cell.gpu_type, gpu_types)

    def _check_fleet(self) -> None:
        for name, counts in (("capacity", self.capacity.values()), ("present", self.present.values())):
            if any(count < 0 for count in counts):
                raise ValueError(f"{name} must not be negative, got {min(counts)}")
        if any(not 0 <= cost < math.inf for cost in self.gpu_cost_per_hour.values()):
            raise ValueError("gpu_cost_per_hour must be finite and not negative")
        for key, profile in self.profiles.items():
            if not (0 < profile.tokens_per_s < math.inf and profile.gpus >= 1 and profile.load_time_s >= 0):
                raise ValueError(
                    f"profiles[{key.model} on {key.gpu_type}]: need tokens_per_s > 0, gpus >= 1, load_time_s >= 0"
                )

    def _check_demand(self) -> None:
        lengths = {len(windows) for windows in self.demand.values()}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(f"demand: all endpoints need the same number of windows, got {sorted(lengths)}")
        for endpoint, windows in self.demand.items():
            if any(not 0 <= value < math.inf for value in windows):
                raise ValueError(f"demand[{_of(endpoint)}] must be finite and not negative, got {min(windows)}")

    def limits_of(self, endpoint: Endpoint) -> tuple[int, int | None]:
        """Fewest and most instances; None = no limit."""
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
    """How to place. The ratios are prices of what a plan may fail to do, so that it never fails as a whole.

    Attributes:
        epsilon: share of an endpoint's peak that its own region must be able to serve.
        gap: proven distance to the optimum that will do, as a share of what serving the demand must cost at least.
        start_remote_ratio: a start takes this many load times where the weights are not in the region (10 min -> 2 h).
        unserved_ratios: price of a token per second not served, in the dearest price of one served. Demand that may
            be served, but not at home, costs half of it.
        minimum_ratio: price of an instance below the minimum, in the dearest price of an instance.
        move_ratio: price of a start or stop in the cheapest price of an instance; it only breaks ties.
    """

    epsilon: float = 0.8
    time_limit_s: float = 30.0
    gap: float = 0.001
    start_remote_ratio: float = 12.0
    unserved_ratios: Mapping[Tier, float] = field(default_factory=_unserved_ratios)
    minimum_ratio: float = 50.0
    move_ratio: float = 1e-3

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


class PlacementStatus(StrEnum):
    """How far the solver came: proven within the gap, cut off by the time limit, or no answer at all."""

    OPTIMAL = "optimal"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class PlacementEntry:
    """Instances of an endpoint on a GPU type, before and after, and why."""

    endpoint: Endpoint
    gpu_type: str
    before: int
    after: int
    reason: str


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
        solver: "highs", "cbc", or "none" where there was nothing to solve or none answered.
        objective_per_hour: the solver's own: GPUs, starts, and prices of what is not served. None if it failed.
        bound_per_hour: no plan can be below this; None if the solver does not say.
        gap: (objective - bound) / objective, as a share of 1; None without a bound.
        gpu_cost_per_hour: price of the placed instances alone.
        entries: every cell with instances before or after, ordered by endpoint and GPU type.
        reason: what the solver said, in plain words.
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


def _of(endpoint: Endpoint) -> str:
    return f"{endpoint.model} in {endpoint.region}"


def _require_distinct(name: str, words: Iterable[str]) -> None:
    ordered = sorted(words)
    if len(set(ordered)) != len(ordered):
        raise ValueError(f"{name} must not name anything twice, got {ordered}")


def _require_known(name: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise ValueError(f"{name} {word!r} is unknown; known: {', '.join(sorted(known)) or 'none'}")
