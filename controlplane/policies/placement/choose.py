"""The hourly placement of models on GPUs (SageServe 5): how many instances of what, where, and why.

`choose_placement` lays the facts out, has the problem solved and puts the answer into words: a small problem by one
integer program, a large one by prices. It never fails for want of GPUs: what cannot be served is listed. If no solver
answers, the present instances stay.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.placement.cost import fleet_cost, gap_of, grid_cost, violations_of
from controlplane.policies.placement.decision import (
    Placement,
    PlacementEntry,
    PlacementStatus,
    PooledEndpoint,
    PoolSize,
)
from controlplane.policies.placement.exact.program import Answer, build_program
from controlplane.policies.placement.exact.solvers import (
    SOLVERS,
    NothingFoundError,
    Solve,
    Solved,
    SolverError,
    solve_first,
)
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.grid import Grid, grid_of
from controlplane.policies.placement.marginal import Marginals
from controlplane.policies.placement.priced.decomposition import PriceSettings, solve_grid
from controlplane.policies.placement.reasons import Explanation


def choose_placement(
    facts: PlacementFacts,
    now_s: float,
    settings: PlacementSettings,
    *,
    solvers: tuple[Solve, ...] = SOLVERS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Placement:
    """Place the coming hour.

    Args:
        facts: the fleet and the demand. Their order does not matter.
        now_s: Unix time; only noted in the answer.
        settings: see PlacementSettings.
        solvers: of the integer program, asked in this order until one answers.
        should_stop: asked now and then while solving by prices; True ends it with what there is.

    Returns:
        The plan. Its status is "failed", with the reason and the present placement, if no solver answered.
    """
    grid = grid_of(facts, settings)
    if not grid.cells and not grid.options:
        return _described(facts, now_s, settings, grid, Answer(counts={}), _nothing_to_place(grid))
    try:
        answer, solved = _solve(grid, settings, solvers, should_stop)
    except SolverError as error:
        return _unchanged(facts, now_s, str(error))
    return _described(facts, now_s, settings, grid, answer, solved)


def _nothing_to_place(grid: Grid) -> Solved:
    return Solved(
        status=PlacementStatus.OPTIMAL,
        solver="none",
        bound=grid_cost(grid, {}, frozenset(), {}),
        said="no instances, and nothing that could be placed",
    )


def _solve(
    grid: Grid, settings: PlacementSettings, solvers: tuple[Solve, ...], should_stop: Callable[[], bool]
) -> tuple[Answer, Solved]:
    """Solve by the integer program where it is small; by prices where it is large, or was not proven in its share of
    the time limit.

    Raises:
        SolverError: no solver answered, or its answer does not fit.
    """
    if len(grid.cells) + len(grid.options) > settings.exact_cells_max:
        return _by_prices(grid, settings, should_stop)
    try:
        answer, solved = _exactly(grid, settings, solvers)
    except NothingFoundError as error:
        answer, solved = _by_prices(grid, settings, should_stop)
        return answer, replace(solved, said=f"{error}; by prices: {solved.said}")
    if solved.status == PlacementStatus.OPTIMAL:
        return answer, solved
    other, priced = _by_prices(grid, settings, should_stop)
    bound = max(each.bound for each in (solved, priced) if each.bound is not None)
    cut_off = solved.status
    if _objective(grid, other) < _objective(grid, answer):
        answer, solved = other, replace(priced, said=f"{solved.said}; better by prices: {priced.said}")
    return answer, replace(solved, bound=bound, status=_status(grid, settings, answer, bound, cut_off))


def _exactly(grid: Grid, settings: PlacementSettings, solvers: tuple[Solve, ...]) -> tuple[Answer, Solved]:
    program = build_program(grid)
    solved = solve_first(program.problem, settings, settings.gap * program.least_cost_per_hour, solvers)
    return _fitting(grid, program.answer(), solved.solver), solved


def _by_prices(grid: Grid, settings: PlacementSettings, should_stop: Callable[[], bool]) -> tuple[Answer, Solved]:
    priced = solve_grid(grid, settings.gap, PriceSettings(), should_stop)
    answer = _fitting(
        grid, Answer(counts=priced.counts, pooled=priced.pooled, pool_gpus=priced.pool_gpus), solver="prices"
    )
    otherwise = PlacementStatus.TIME_LIMIT if should_stop() else PlacementStatus.BOUNDED
    status = _status(grid, settings, answer, priced.bound, otherwise)
    return answer, Solved(status=status, solver="prices", bound=priced.bound, said=priced.reason)


def _fitting(grid: Grid, answer: Answer, solver: str) -> Answer:
    violations = violations_of(grid, answer.counts, answer.pooled, answer.pool_gpus)
    if violations:
        raise SolverError(f"{solver} answered what does not fit: {'; '.join(violations)}")
    return answer


def _objective(grid: Grid, answer: Answer) -> float:
    return grid_cost(grid, answer.counts, answer.pooled, answer.pool_gpus)


def _status(
    grid: Grid, settings: PlacementSettings, answer: Answer, bound: float, otherwise: PlacementStatus
) -> PlacementStatus:
    gap = gap_of(_objective(grid, answer), bound, fleet_cost(grid, answer.counts, answer.pool_gpus))
    return PlacementStatus.OPTIMAL if gap <= settings.gap else otherwise


def _described(
    facts: PlacementFacts, now_s: float, settings: PlacementSettings, grid: Grid, answer: Answer, solved: Solved
) -> Placement:
    objective = _objective(grid, answer)
    gpu_cost = fleet_cost(grid, answer.counts, answer.pool_gpus)
    bound = None if solved.bound is None else min(solved.bound, objective)
    gap = None if bound is None else gap_of(objective, bound, gpu_cost)
    proven = "" if gap is None else f", proven within {100 * gap:.3f} % of the fleet's cost"
    explanation = Explanation(facts, settings, grid, answer)
    marginals = Marginals(grid, answer)
    return Placement(
        at_s=now_s,
        status=solved.status,
        solver=solved.solver,
        objective_per_hour=objective,
        bound_per_hour=bound,
        gap=gap,
        gpu_cost_per_hour=gpu_cost,
        entries=_entries(grid, answer, explanation, marginals),
        unserved=explanation.unserved(),
        below_minimum=explanation.below_minimum(),
        reason=f"{solved.said}{proven}",
        pools=_pools(grid, answer),
        pooled=_pooled(grid, answer, explanation, marginals),
    )


def _entries(grid: Grid, answer: Answer, explanation: Explanation, marginals: Marginals) -> tuple[PlacementEntry, ...]:
    entries = []
    for cell in grid.cells:
        after = answer.counts.get(cell.key, 0)
        if cell.present or after:
            reason, constraint = explanation.of_cell(cell)
            entry = PlacementEntry(
                endpoint=cell.endpoint,
                gpu_type=cell.key.gpu_type,
                before=cell.present,
                after=after,
                reason=reason,
                constraint=constraint,
                cost_if_not=marginals.of_cell(cell),
            )
            entries.append(entry)
    return tuple(entries)


def _pools(grid: Grid, answer: Answer) -> tuple[PoolSize, ...]:
    return tuple(
        PoolSize(region=row.place.region, gpu_type=row.place.gpu_type, before=row.pool_before, after=after)
        for row in grid.places
        if (after := answer.pool_gpus.get(row.place, 0)) or row.pool_before
    )


def _pooled(grid: Grid, answer: Answer, explanation: Explanation, marginals: Marginals) -> tuple[PooledEndpoint, ...]:
    return tuple(
        PooledEndpoint(
            endpoint=row.endpoint,
            gpu_type=option.key.gpu_type,
            occupancy=option.occupancy,
            before=option.before,
            reason=explanation.of_pooled(row),
            cost_if_not=marginals.of_pooling(row),
        )
        for model in grid.models
        for row in model.endpoints
        for option in row.options
        if option.key in answer.pooled
    )


def _unchanged(facts: PlacementFacts, now_s: float, complaint: str) -> Placement:
    """The present, as it is: instances, pools and pooled endpoints."""
    why = "no change: no solver answered, the present placement stays"
    pool = facts.pool
    profiles, prices = facts.profiles, facts.gpu_cost_per_hour
    present = sorted((key, count) for key, count in facts.present.items() if count)
    pools = sorted((place, gpus) for place, gpus in pool.present.items() if gpus) if pool is not None else []
    instances = (
        count * profiles[ModelGpu(model=key.model, gpu_type=key.gpu_type)].gpus * prices[key.gpu_type]
        for key, count in present
    )
    return Placement(
        at_s=now_s,
        status=PlacementStatus.FAILED,
        solver="none",
        objective_per_hour=None,
        bound_per_hour=None,
        gap=None,
        gpu_cost_per_hour=math.fsum((*instances, *(gpus * prices[place.gpu_type] for place, gpus in pools))),
        entries=tuple(
            PlacementEntry(
                endpoint=Endpoint(model=key.model, region=key.region),
                gpu_type=key.gpu_type,
                before=count,
                after=count,
                reason=why,
            )
            for key, count in present
        ),
        unserved=(),
        below_minimum=(),
        reason=complaint,
        pools=tuple(
            PoolSize(region=place.region, gpu_type=place.gpu_type, before=gpus, after=gpus) for place, gpus in pools
        ),
        pooled=tuple(
            PooledEndpoint(
                endpoint=Endpoint(model=key.model, region=key.region),
                gpu_type=key.gpu_type,
                occupancy=pool.occupancy.get(key, 0.0),
                before=True,
                reason=why,
            )
            for key in sorted(pool.pooled)
        )
        if pool is not None
        else (),
    )
