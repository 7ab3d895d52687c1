"""The hourly placement of models on GPUs (SageServe 5): how many instances of what, where, and why.

`choose_placement` lays the facts out, has the problem solved and puts the answer into words: a small problem by one
integer program, a large one by prices. It never fails for want of GPUs: what cannot be served is listed. Should a
solver answer what does not fit, the present instances stay.
"""

from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from controlplane.policies.placement.cost import fleet_cost, gap_of, grid_cost, violations_of
from controlplane.policies.placement.decision import (
    Placement,
    PlacementEntry,
    PlacementStatus,
    PooledEndpoint,
    PoolSize,
)
from controlplane.policies.placement.exact.solve import Solved, solve_exactly
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.grid import Answer, Grid, grid_of
from controlplane.policies.placement.marginal import Marginals
from controlplane.policies.placement.priced.decomposition import PriceSettings, solve_grid
from controlplane.policies.placement.reasons import Explanation


class SolverError(Exception):
    """A solver answered what does not fit; the message says how."""


def choose_placement(
    facts: PlacementFacts,
    now_s: float,
    settings: PlacementSettings,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Placement:
    """Place the coming hour. The same facts and settings give the same plan, unless a time limit cuts the search off.

    Args:
        facts: the fleet and the demand. Their order does not matter.
        now_s: Unix time; only noted in the answer.
        settings: see PlacementSettings.
        should_stop: asked now and then while solving by prices; True ends it with what there is.

    Returns:
        The plan. Its status is "failed", with the reason and the present placement, if the answer found does not fit.
    """
    grid = grid_of(facts, settings)
    if not grid.cells and not grid.options:
        nothing = Answer(counts={})
        bound, message = grid_cost(grid, nothing), "no instances, and nothing that could be placed"
        solved = Solved(status=PlacementStatus.OPTIMAL, solver="none", bound=bound, message=message)
        return _described(facts, now_s, settings, grid, nothing, solved)
    try:
        answer, solved = _solve(grid, settings, should_stop)
    except SolverError as error:
        return _unchanged(facts, now_s, grid, str(error))
    return _described(facts, now_s, settings, grid, answer, solved)


def _solve(grid: Grid, settings: PlacementSettings, should_stop: Callable[[], bool]) -> tuple[Answer, Solved]:
    """Solve by the integer program where it is small; by prices where it is large, or was not proven within its bound
    of work.

    Raises:
        SolverError: an answer does not fit.
    """
    if len(grid.cells) + len(grid.options) > settings.exact_cells_max:
        return _by_prices(grid, settings, should_stop)
    answer, solved = solve_exactly(grid, settings)
    if answer and solved.status == PlacementStatus.OPTIMAL:
        return _fitting(grid, answer, solved.solver), solved
    other, priced = _by_prices(grid, settings, should_stop)
    late = PlacementStatus.TIME_LIMIT in (solved.status, priced.status)
    cut_off = PlacementStatus.TIME_LIMIT if late else PlacementStatus.BOUNDED
    bound = max(solved.bound, priced.bound)
    if answer and not violations_of(grid, answer) and grid_cost(grid, answer) <= grid_cost(grid, other):
        return answer, replace(solved, bound=bound, status=_status(grid, settings, answer, bound, cut_off))
    message = f"{solved.message}; better by prices: {priced.message}"
    return other, replace(priced, bound=bound, message=message, status=_status(grid, settings, other, bound, cut_off))


def _by_prices(grid: Grid, settings: PlacementSettings, should_stop: Callable[[], bool]) -> tuple[Answer, Solved]:
    priced = solve_grid(grid, settings.gap, PriceSettings(), should_stop)
    answer = _fitting(grid, priced, "prices")
    otherwise = PlacementStatus.TIME_LIMIT if should_stop() else PlacementStatus.BOUNDED
    status = _status(grid, settings, answer, priced.bound, otherwise)
    return answer, Solved(status=status, solver="prices", bound=priced.bound, message=priced.reason)


def _fitting(grid: Grid, answer: Answer, solver: str) -> Answer:
    if violations := violations_of(grid, answer):
        raise SolverError(f"{solver} answered what does not fit: {'; '.join(violations)}")
    return answer


def _status(
    grid: Grid, settings: PlacementSettings, answer: Answer, bound: float, otherwise: PlacementStatus
) -> PlacementStatus:
    gap = gap_of(grid_cost(grid, answer), bound, fleet_cost(grid, answer))
    return PlacementStatus.OPTIMAL if gap <= settings.gap else otherwise


def _described(
    facts: PlacementFacts, now_s: float, settings: PlacementSettings, grid: Grid, answer: Answer, solved: Solved
) -> Placement:
    objective = grid_cost(grid, answer)
    gpu_cost = fleet_cost(grid, answer)
    bound = min(solved.bound, objective)
    gap = gap_of(objective, bound, gpu_cost)
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
        reason=f"{solved.message}, proven within {100 * gap:.3f} % of the fleet's cost",
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
        PoolSize(**structs.asdict(pool.key), before=pool.before, after=after)
        for row in grid.places
        for pool in row.pools
        if (after := answer.pool_gpus.get(pool.key, 0)) or pool.before
    )


def _pooled(grid: Grid, answer: Answer, explanation: Explanation, marginals: Marginals) -> tuple[PooledEndpoint, ...]:
    return tuple(
        PooledEndpoint(
            endpoint=row.endpoint,
            gpu_type=option.key.gpu_type,
            worker_gpus=option.pool.worker_gpus,
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


def _unchanged(facts: PlacementFacts, now_s: float, grid: Grid, error: str) -> Placement:
    """The present, as it is: instances, pools and pooled endpoints."""
    why = "no change: no solver's answer fits, the present placement stays"
    answer = Answer(
        counts={cell.key: cell.present for cell in grid.cells},
        pooled=frozenset() if facts.pool is None else facts.pool.pooled,
        pool_gpus={pool.key: pool.before for row in grid.places for pool in row.pools},
    )
    shares = {} if facts.pool is None else facts.pool.occupancy
    return Placement(
        at_s=now_s,
        status=PlacementStatus.FAILED,
        solver="none",
        objective_per_hour=None,
        bound_per_hour=None,
        gap=None,
        gpu_cost_per_hour=fleet_cost(grid, answer),
        entries=tuple(
            PlacementEntry(
                endpoint=cell.endpoint,
                gpu_type=cell.key.gpu_type,
                before=cell.present,
                after=cell.present,
                reason=why,
            )
            for cell in grid.cells
            if cell.present
        ),
        unserved=(),
        below_minimum=(),
        reason=error,
        pools=_pools(grid, answer),
        pooled=tuple(
            PooledEndpoint(
                endpoint=key.endpoint,
                gpu_type=key.gpu_type,
                worker_gpus=1 if facts.pool is None else facts.pool.pool(key).worker_gpus,
                occupancy=shares.get(key, 0.0),
                before=True,
                reason=why,
            )
            for key in sorted(answer.pooled)
        ),
    )
