"""The placement problem written down plainly for PuLP, as SageServe 5 has it: no pools, nothing tightened.

What the benchmark measures against. Demand not served and minima not held are priced as everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulp

from controlplane.policies.facts import EndpointGpu
from controlplane.policies.placement.grid import Grid


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainProgram:
    """The problem, and the variable of each cell's count."""

    problem: Any
    counts: Mapping[EndpointGpu, Any]


def plain_program(grid: Grid) -> PlainProgram:
    """The integer program of a grid without spot instances; its pool options are left out."""
    problem = pulp.LpProblem("plain", pulp.LpMinimize)
    cost: list[Any] = []
    counts = {}
    for number, cell in enumerate(grid.cells):
        count = counts[cell.key] = problem.add_variable(f"x{number}", 0, cell.most, pulp.LpInteger)
        started = problem.add_variable(f"u{number}", 0)
        problem.addConstraint(started >= count - cell.present)
        move = grid.move_price
        cost.append((cell.price_per_hour - move) * count + (cell.fresh_price + 2 * move) * started)
    for number, model in enumerate(grid.models):
        for place, endpoint in enumerate(model.endpoints):
            here = [(cell.profile.tokens_per_s, counts[cell.key]) for cell in endpoint.cells]
            total = pulp.lpSum(count for _speed, count in here)
            if endpoint.most is not None and here:
                problem.addConstraint(total <= endpoint.most)
            if endpoint.fewest:
                few = problem.add_variable(f"few{number}_{place}", 0)
                problem.addConstraint(total + few >= endpoint.fewest)
                cost.append(endpoint.few_price * few)
            _ask(problem, cost, here, endpoint.home, endpoint.home_price, f"home{number}_{place}")
        all_cells = [
            (cell.profile.tokens_per_s, counts[cell.key]) for endpoint in model.endpoints for cell in endpoint.cells
        ]
        _ask(problem, cost, all_cells, model.peak, model.price, f"global{number}")
    for row in grid.places:
        if row.cells:
            taken = pulp.lpSum(cell.profile.gpus * counts[cell.key] for cell in row.cells)
            problem.addConstraint(taken <= row.capacity)
    problem.setObjective(pulp.lpSum(cost))
    return PlainProgram(problem=problem, counts=counts)


def _ask(problem: Any, cost: list[Any], cells: list[tuple[float, Any]], wanted: float, price: float, name: str) -> None:
    """A demand row, in instances of the fastest GPU type: numbers near 1 are kinder to solvers."""
    if wanted <= 0:
        return
    unit = max((speed for speed, _count in cells), default=1.0)
    short = problem.add_variable(name, 0)
    problem.addConstraint(pulp.lpSum(speed / unit * count for speed, count in cells) + short >= wanted / unit)
    cost.append(price * unit * short)
