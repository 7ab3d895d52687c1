"""How well and how fast placement is solved: by prices against the plain integer program, large fleets, pools.

Seconds are of one thread; `cpu_s` is what the process itself used, which a busy machine lengthens less than `wall_s`.
The plain program is SageServe 5's, for PuLP: no pools, no tightening; demand not served and minima not
held are priced as everywhere.
"""

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from statistics import median
from typing import Annotated, Any

import highspy
import pulp
import typer

from controlplane.policies.placement.cost import fleet_cost, gap_of, grid_cost, violations_of
from controlplane.policies.placement.exact.solve import solve_exactly
from controlplane.policies.placement.facts import PlacementSettings
from controlplane.policies.placement.grid import Grid, grid_of
from controlplane.policies.placement.priced.decomposition import PricedSolution, PriceSettings, solve_grid
from ops.bench.planner.placement_problems import ProblemShape, demand_shares, make_problem
from ops.client.screen import AsJson, Columns, notes, print_json, print_table


def plain_program(grid: Grid) -> Any:
    """The integer program of a grid without donated instances; its pool options are left out."""
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
    return problem


def _ask(problem: Any, cost: list[Any], cells: list[tuple[float, Any]], wanted: float, price: float, name: str) -> None:
    """Add a demand row, in instances of the fastest GPU type: solvers handle numbers near 1 better."""
    if wanted <= 0:
        return
    unit = max((speed for speed, _count in cells), default=1.0)
    short = problem.add_variable(name, 0)
    problem.addConstraint(pulp.lpSum(speed / unit * count for speed, count in cells) + short >= wanted / unit)
    cost.append(price * unit * short)


GAPS = (0.005, 0.001)
SMALL = ProblemShape(models=4, regions=3, gpu_types=1, seed=1)
MEDIUM = ProblemShape(models=20, regions=20, gpu_types=5, seed=1)
LARGE = (
    ProblemShape(models=200, regions=30, gpu_types=6, seed=1),
    ProblemShape(models=1000, regions=60, gpu_types=8, seed=1, gpus_per_endpoint=6.0),
)
LARGE_GAP = 0.005
LONG_TAIL = ProblemShape(models=100, regions=4, gpu_types=4, seed=1, gpus_per_endpoint=4.0, skew=3.6, pools=True)
"""A skew at which 94 % of the models have under about 1.35 % of the requests."""


@dataclass(frozen=True, kw_only=True)
class Solving:
    """One solver on one problem. `gap`: proven, of the fleet's cost; None if nothing was found."""

    solver: str
    shape: str
    seed: int
    wanted_gap: float
    gap: float | None
    cpu_s: float
    wall_s: float

    @property
    def reached(self) -> bool:
        return self.gap is not None and self.gap <= self.wanted_gap + 1e-9


@dataclass(frozen=True, kw_only=True)
class LargeFleet:
    """One large problem. `layout_s` of `cpu_s` lays the facts out, before any solver."""

    shape: str
    cells: int
    gap: float
    cpu_s: float
    layout_s: float
    wall_s: float
    peak_mb: float
    how: str


@dataclass(frozen=True, kw_only=True)
class PoolSaving:
    """The same fleet without and with pools. `tail_share`: requests of the least used 94 % of the models."""

    shape: str
    tail_share: float
    gpus_without: int
    gpus_with: int
    pool_gpus: int
    pooled_endpoints: int
    gap_without: float
    gap_with: float


class _Watch:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"cpu_s": time.process_time() - self._cpu, "wall_s": time.perf_counter() - self._wall}


def measure_against_plain(shape: ProblemShape, seeds: Sequence[int], limit_s: float, *, plain: bool) -> list[Solving]:
    """Our solver, and the `plain` program too, on the same problems to the same gaps, one after the other."""
    rows = []
    for seed in seeds:
        grid = grid_of(make_problem(replace(shape, seed=seed)), PlacementSettings())
        for gap in GAPS:
            row, fleet = _ours(grid, shape, seed, gap, limit_s)
            both = [row, _by_highs(grid, shape, seed, gap, limit_s, fleet)] if plain else [row]
            rows += both
            for row in both:
                notes().print(f"{row.shape} seed {seed} {row.solver} {gap:.1%}: {row.gap} in {row.cpu_s:.1f} s")
    return rows


def _ours(grid: Grid, shape: ProblemShape, seed: int, gap: float, limit_s: float) -> tuple[Solving, float]:
    """Solve as the planner does, small fleets exactly, others by prices; also the price per hour of the result."""
    settings, watch = PlacementSettings(gap=gap, time_limit_s=limit_s), _Watch()
    if len(grid.cells) <= settings.exact_cells_max:
        answer, solved = solve_exactly(grid, settings)
        assert answer is not None
        fleet, solver = fleet_cost(grid, answer), "ours, exact"
        reached = gap_of(grid_cost(grid, answer), solved.bound, fleet)
    else:
        found = solve_grid(grid, gap, PriceSettings(), lambda: watch.read()["cpu_s"] > limit_s)
        assert not violations_of(grid, found)
        fleet, reached, solver = fleet_cost(grid, found), found.gap, "ours, by prices"
    row = Solving(solver=solver, shape=_named(shape), seed=seed, wanted_gap=gap, gap=reached, **watch.read())
    return row, fleet


def _by_highs(grid: Grid, shape: ProblemShape, seed: int, gap: float, limit_s: float, fleet: float) -> Solving:
    """Solve by HiGHS, which stops at the same distance in cost per hour: the gap of a fleet that costs `fleet`. What it
    proves is told of that fleet too: its own may cost a little less, and it would just miss what it was asked for.
    """
    watch = _Watch()
    problem = plain_program(grid)

    def stop(_kind: Any, _said: str, _out: Any, order: Any, _data: Any) -> None:
        order.user_interrupt = watch.read()["cpu_s"] > limit_s

    solver = pulp.HiGHS(
        msg=False,
        gapRel=0.0,
        gapAbs=gap * fleet,
        threads=1,
        random_seed=1,
        callbackTuple=(stop, None),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
    )
    problem.solve(solver)
    read = watch.read()
    info = problem.solverModel.getInfo()
    above = max(0.0, float(info.objective_function_value) - float(info.mip_dual_bound))
    proven = above / fleet if fleet and above < math.inf else None
    return Solving(solver="plain, HiGHS", shape=_named(shape), seed=seed, wanted_gap=gap, gap=proven, **read)


def measure_cbc(shape: ProblemShape, limit_s: float) -> Solving:
    """CBC on one problem, for contrast."""
    grid = grid_of(make_problem(shape), PlacementSettings())
    problem = plain_program(grid)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    path = pulp.PULP_CBC_CMD.pulp_cbc_path
    problem.solve(pulp.COIN_CMD(path=path, msg=False, timeLimit=limit_s, gapRel=GAPS[-1], threads=1))
    done = problem.sol_status == pulp.LpSolutionOptimal
    return Solving(
        solver="plain, CBC",
        shape=_named(shape),
        seed=shape.seed,
        wanted_gap=GAPS[-1],
        gap=GAPS[-1] if done else None,
        cpu_s=resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before,
        wall_s=time.perf_counter() - start,
    )


def measure_large(shape: ProblemShape) -> LargeFleet:
    """One large problem to `LARGE_GAP`, in a process of its own, so that the memory is its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as own:
        return own.submit(_large, shape).result()


def _large(shape: ProblemShape) -> LargeFleet:
    facts = make_problem(shape)
    watch = _Watch()
    grid = grid_of(facts, PlacementSettings())
    layout_s = watch.read()["cpu_s"]
    found = solve_grid(grid, LARGE_GAP)
    read = watch.read()
    assert not violations_of(grid, found)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return LargeFleet(
        shape=_named(shape),
        cells=len(grid.cells),
        gap=found.gap,
        layout_s=layout_s,
        peak_mb=peak_mb,
        how=found.reason,
        **read,
    )


def measure_pools(shape: ProblemShape) -> PoolSaving:
    """GPUs that a long-tailed fleet takes without and with pools."""
    facts = make_problem(shape)
    shares = demand_shares(facts)
    without, gpus_without = _placed(grid_of(replace(facts, pool=None), PlacementSettings()))
    with_pools, gpus_with = _placed(grid_of(facts, PlacementSettings()))
    return PoolSaving(
        shape=_named(shape),
        tail_share=sum(shares[: round(0.94 * len(shares))]),
        gpus_without=gpus_without,
        gpus_with=gpus_with,
        pool_gpus=sum(with_pools.pool_gpus.values()),
        pooled_endpoints=len(with_pools.pooled),
        gap_without=without.gap,
        gap_with=with_pools.gap,
    )


def _placed(grid: Grid) -> tuple[PricedSolution, int]:
    found = solve_grid(grid, 0.005)
    assert not violations_of(grid, found)
    gpus = {cell.key: cell.profile.gpus for cell in grid.cells}
    instances = sum(count * gpus[key] for key, count in found.counts.items())
    return found, instances + sum(found.pool_gpus.values())


def _named(shape: ProblemShape) -> str:
    return f"{shape.models} x {shape.regions} x {shape.gpu_types}"


def main(
    *,
    seeds: Annotated[int, typer.Option(help="Problems of each size against the plain program.")] = 10,
    limit_s: Annotated[float, typer.Option(help="CPU seconds of each solve against the plain program.")] = 60.0,
    plain: Annotated[bool, typer.Option(help="The plain program by HiGHS on the same problems.")] = True,
    cbc: Annotated[bool, typer.Option(help="CBC on one problem, for contrast.")] = True,
    large: Annotated[bool, typer.Option(help="200 x 30 x 6 and 1,000 x 60 x 8.")] = True,
    pools: Annotated[bool, typer.Option(help="GPUs that pools save on a long-tailed fleet.")] = True,
    as_json: AsJson = False,
) -> None:
    """Figures of placement: gap and time by prices and by the plain program, large fleets, pools.

    Example: python -m ops.bench.planner.placement --seeds 3 --no-large --json > placement.json
    """
    rows: list[Solving] = []
    for shape in (SMALL, MEDIUM) if seeds else ():
        rows += measure_against_plain(shape, range(1, seeds + 1), limit_s, plain=plain)
    if cbc:
        rows.append(measure_cbc(MEDIUM, limit_s))
    fleets = [measure_large(shape) for shape in LARGE] if large else []
    saving = measure_pools(LONG_TAIL) if pools else None
    summary = _medians(rows)
    if as_json:
        print_json(
            {
                "solving": [asdict(row) for row in rows],
                "medians": summary,
                "large": [asdict(row) for row in fleets],
                "pools": asdict(saving) if saving else None,
            }
        )
        return
    _print(rows, summary, fleets, saving)


def _medians(rows: Sequence[Solving]) -> list[dict[str, Any]]:
    """One row for each size, gap and solver."""
    found = []
    for key in sorted({(row.shape, -row.wanted_gap, row.solver) for row in rows}):
        group = [row for row in rows if (row.shape, -row.wanted_gap, row.solver) == key]
        gaps = [row.gap for row in group if row.gap is not None]
        found.append(
            {
                "shape": key[0],
                "wanted_gap": -key[1],
                "solver": key[2],
                "problems": len(group),
                "reached": sum(row.reached for row in group),
                "gap": median(gaps) if gaps else None,
                "cpu_s": median(row.cpu_s for row in group),
                "cpu_most_s": max(row.cpu_s for row in group),
                "wall_s": median(row.wall_s for row in group),
            }
        )
    return found


def _print(
    rows: Sequence[Solving], summary: list[dict[str, Any]], fleets: Sequence[LargeFleet], saving: PoolSaving | None
) -> None:
    def percent(name: str) -> Callable[[Mapping[str, Any]], object]:
        return lambda row: "-" if row[name] is None else f"{row[name]:.3%}"

    def rounded(name: str) -> Callable[[Mapping[str, Any]], object]:
        return lambda row: f"{row[name]:.1f}"

    times = {name: rounded(name) for name in ("cpu_s", "cpu_most_s", "wall_s")}
    instances: Columns = {name: name for name in ("shape", "seed", "solver", "reached")}
    print_table(
        "Problems",
        {**instances, "wanted": percent("wanted_gap"), "gap": percent("gap"), "cpu_s": times["cpu_s"]},
        [{**asdict(row), "reached": row.reached} for row in rows],
    )
    columns: Columns = {name: name for name in ("shape", "solver", "problems", "reached")}
    print_table("Medians", {**columns, "wanted": percent("wanted_gap"), "gap": percent("gap"), **times}, summary)
    sizes = {name: rounded(name) for name in ("cpu_s", "layout_s", "wall_s", "peak_mb")}
    print_table(
        "Large fleets",
        {"shape": "shape", "cells": "cells", "gap": percent("gap"), **sizes, "how": "how"},
        [asdict(row) for row in fleets],
    )
    if saving:
        print_table("Pools on a long tail", {name: name for name in asdict(saving)}, [asdict(saving)])


if __name__ == "__main__":
    typer.run(main)
