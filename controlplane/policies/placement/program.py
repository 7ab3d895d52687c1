"""The placement problem as an integer program (SageServe 5), without pools.

    x_ijk instances of model i in region j on GPU type k; u_ijk of them started

    sum_k x_ijk theta_ik        + home_ij  >= epsilon * max_w rho_ij(w)       each i, j
    sum_jk x_ijk theta_ik       + global_i >= max_w sum_j rho_ij(w)           each i
    sum_k x_ijk                 + few_ij   >= min_ij,  sum_k x_ijk <= max_ij   each i, j
    sum_i x_ijk g_ik                       <= V_jk                            each j, k
    u_ijk >= x_ijk - n_ijk, u_ijk >= 0                                        (no big-M)

    minimise  sum price_ik x_ijk + sum start_ijk u_ijk + moves + prices of home, global, few

`home`, `global` and `few` take up what capacity cannot hold, so the program always has a solution. The cost is the
whole fleet's, not the change of it: a relative gap then means something. Moves are u + (u - x + n), starts and stops,
at a price that only breaks ties. Rows are divided by the model's best throughput: their numbers count instances.
Everything is built in sorted order: the same facts give the same program, in whatever order they came.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pulp

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.facts import PlacementFacts, PlacementModel, PlacementSettings, Profile


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A place where instances can stand, and what one costs there. `most`: what limit and capacity leave room for."""

    key: EndpointGpu
    profile: Profile
    price_per_hour: float
    start_price: float
    present: int
    most: int

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint it belongs to."""
        return Endpoint(model=self.key.model, region=self.key.region)

    @property
    def place(self) -> RegionGpu:
        """Whose capacity it takes."""
        return RegionGpu(region=self.key.region, gpu_type=self.key.gpu_type)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The built problem and its variables. `least_cost_per_hour`: no way of serving the demand is cheaper."""

    problem: Any
    cells: tuple[Cell, ...]
    counts: Mapping[EndpointGpu, Any]
    least_cost_per_hour: float


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """Prices of falling short, in the unit of `gpu_cost_per_hour`."""

    token: float
    instance: float
    move: float


def build_program(facts: PlacementFacts, settings: PlacementSettings) -> Program:
    """Build the integer program of these facts."""
    cells = tuple(_cells(facts, settings))
    builder = _Builder(facts, settings, cells)
    for number, cell in enumerate(cells):
        builder.add_cell(cell, number)
    for number, model in enumerate(sorted(facts.models)):
        builder.add_model(model, number)
    for place, capacity in sorted(facts.capacity.items()):
        builder.add_capacity(place, capacity)
    builder.problem.setObjective(pulp.lpSum(builder.cost))
    return Program(
        problem=builder.problem,
        cells=cells,
        counts=builder.counts,
        least_cost_per_hour=_least_cost(facts, cells),
    )


def _cells(facts: PlacementFacts, settings: PlacementSettings) -> Iterable[Cell]:
    for model in sorted(facts.models):
        endpoints = [Endpoint(model=model.name, region=region) for region in sorted(facts.regions)]
        wanted = facts.global_peak_of(model.name) > 0 or any(facts.limits_of(endpoint)[0] for endpoint in endpoints)
        for endpoint in endpoints:
            for gpu_type in sorted(facts.gpu_cost_per_hour):
                cell = _cell(facts, settings, endpoint, gpu_type)
                if cell is not None and (cell.present or (wanted and cell.most)):
                    yield cell


def _cell(facts: PlacementFacts, settings: PlacementSettings, endpoint: Endpoint, gpu_type: str) -> Cell | None:
    profile = facts.profiles.get(ModelGpu(model=endpoint.model, gpu_type=gpu_type))
    if profile is None:
        return None
    room = facts.capacity.get(RegionGpu(region=endpoint.region, gpu_type=gpu_type), 0) // profile.gpus
    most = facts.limits_of(endpoint)[1]
    price_per_hour = profile.gpus * facts.gpu_cost_per_hour[gpu_type]
    far = 1.0 if endpoint in facts.weights_present else settings.start_remote_ratio
    key = EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=gpu_type)
    return Cell(
        key=key,
        profile=profile,
        price_per_hour=price_per_hour,
        start_price=price_per_hour * profile.load_time_s * far / 3600.0,
        present=facts.present.get(key, 0),
        most=room if most is None else min(room, most),
    )


def _prices(cells: tuple[Cell, ...], settings: PlacementSettings) -> _Prices:
    whole = [cell.price_per_hour + cell.start_price for cell in cells]
    cheapest = min((cell.price_per_hour for cell in cells if cell.price_per_hour), default=1.0)
    return _Prices(
        token=max((price / cell.profile.tokens_per_s for price, cell in zip(whole, cells, strict=True)), default=0)
        or 1.0,
        instance=settings.minimum_ratio * (max(whole, default=0) or 1.0),
        move=settings.move_ratio * cheapest,
    )


class _Builder:
    """The program while it grows: rows go into `problem`, terms of the objective into `cost`."""

    def __init__(self, facts: PlacementFacts, settings: PlacementSettings, cells: tuple[Cell, ...]) -> None:
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self.counts: dict[EndpointGpu, Any] = {}
        self.cost: list[Any] = []
        self._facts = facts
        self._settings = settings
        self._prices = _prices(cells, settings)
        self._of_model: dict[str, list[Cell]] = {}
        self._at_place: dict[RegionGpu, list[Cell]] = {}
        for cell in cells:
            self._of_model.setdefault(cell.key.model, []).append(cell)
            self._at_place.setdefault(cell.place, []).append(cell)

    def add_cell(self, cell: Cell, number: int) -> None:
        count = self.problem.add_variable(f"x{number:06d}", 0, cell.most, pulp.LpInteger)
        started = self.problem.add_variable(f"u{number:06d}", 0)
        self.problem.addConstraint(started - count >= -cell.present)
        move = self._prices.move
        self.cost.append((cell.price_per_hour - move) * count + (cell.start_price + 2 * move) * started)
        self.counts[cell.key] = count

    def add_model(self, model: PlacementModel, number: int) -> None:
        cells = tuple(self._of_model.get(model.name, ()))
        unit = max((cell.profile.tokens_per_s for cell in cells), default=1.0)
        short_price = self._settings.unserved_ratios[model.tier] * self._prices.token * unit
        for place, region in enumerate(sorted(self._facts.regions)):
            endpoint = Endpoint(model=model.name, region=region)
            here = tuple(cell for cell in cells if cell.endpoint == endpoint)
            name = f"{number:06d}_{place:04d}"
            self._add_limits(endpoint, here, name)
            at_home = self._settings.epsilon * self._facts.peak_of(endpoint)
            self._add_demand(here, at_home / unit, unit, f"home{name}", short_price / 2)
        self._add_demand(cells, self._facts.global_peak_of(model.name) / unit, unit, f"global{number:06d}", short_price)

    def add_capacity(self, place: RegionGpu, capacity: int) -> None:
        taken = [cell.profile.gpus * self.counts[cell.key] for cell in self._at_place.get(place, ())]
        if taken:
            self.problem.addConstraint(pulp.lpSum(taken) <= capacity)

    def _add_limits(self, endpoint: Endpoint, here: tuple[Cell, ...], name: str) -> None:
        fewest, most = self._facts.limits_of(endpoint)
        total = pulp.lpSum(self.counts[cell.key] for cell in here)
        if most is not None and here:
            self.problem.addConstraint(total <= most)
        if fewest:
            few = self.problem.add_variable(f"few{name}", 0)
            self.problem.addConstraint(total + few >= fewest)
            self.cost.append(self._prices.instance * few)

    def _add_demand(self, cells: tuple[Cell, ...], wanted: float, unit: float, name: str, price: float) -> None:
        if wanted > 0:
            short = self.problem.add_variable(name, 0)
            served = pulp.lpSum(cell.profile.tokens_per_s / unit * self.counts[cell.key] for cell in cells)
            self.problem.addConstraint(served + short >= wanted)
            self.cost.append(price * short)


def _least_cost(facts: PlacementFacts, cells: tuple[Cell, ...]) -> float:
    """What the demand costs on the best GPU type of each model, were instances divisible."""
    best: dict[str, float] = {}
    for cell in cells:
        rate = cell.price_per_hour / cell.profile.tokens_per_s
        best[cell.key.model] = min(rate, best.get(cell.key.model, rate))
    return math.fsum(facts.global_peak_of(model) * rate for model, rate in best.items())
