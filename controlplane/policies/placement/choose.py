"""The hourly placement of models on GPUs (SageServe 5): how many instances of what, where, and why.

`choose_placement` builds the integer program, lets a solver answer it and puts the answer into words. It never fails
for want of GPUs: what cannot be served is listed. If no solver answers, the present instances stay.
"""

import math
from collections.abc import Mapping

from controlplane.policies.facts import Endpoint, EndpointGpu
from controlplane.policies.placement.facts import (
    Placement,
    PlacementEntry,
    PlacementFacts,
    PlacementSettings,
    PlacementStatus,
)
from controlplane.policies.placement.program import Program, build_program
from controlplane.policies.placement.reasons import Explanation
from controlplane.policies.placement.solvers import SOLVERS, Solve, Solved, SolverError, solve_first


def choose_placement(
    facts: PlacementFacts, now_s: float, settings: PlacementSettings, *, solvers: tuple[Solve, ...] = SOLVERS
) -> Placement:
    """Place the coming hour.

    Args:
        facts: the fleet and the demand. Their order does not matter.
        now_s: Unix time; only noted in the answer.
        settings: see PlacementSettings.
        solvers: asked in this order until one answers.

    Returns:
        The plan. Its status is "failed", with the reason and the present placement, if no solver answered.
    """
    program = build_program(facts, settings)
    if not program.problem.variables():
        nothing = Solved(
            status=PlacementStatus.OPTIMAL,
            solver="none",
            objective=0.0,
            bound=0.0,
            gap=0.0,
            reason="no demand, no minimum and no instances: nothing to place",
        )
        return _placement(facts, now_s, settings, program, nothing)
    try:
        solved = solve_first(program.problem, settings, settings.gap * program.least_cost_per_hour, solvers)
    except SolverError as error:
        return _unchanged(facts, now_s, str(error))
    return _placement(facts, now_s, settings, program, solved)


def _placement(
    facts: PlacementFacts, now_s: float, settings: PlacementSettings, program: Program, solved: Solved
) -> Placement:
    after = {cell.key: round(program.counts[cell.key].varValue or 0.0) for cell in program.cells}
    explanation = Explanation(facts, settings, program.cells, after)
    return Placement(
        at_s=now_s,
        status=solved.status,
        solver=solved.solver,
        objective_per_hour=solved.objective,
        bound_per_hour=solved.bound,
        gap=solved.gap,
        gpu_cost_per_hour=math.fsum(cell.price_per_hour * after[cell.key] for cell in program.cells),
        entries=tuple(
            PlacementEntry(
                endpoint=cell.endpoint,
                gpu_type=cell.key.gpu_type,
                before=cell.present,
                after=after[cell.key],
                reason=explanation.of_cell(cell),
            )
            for cell in program.cells
            if cell.present or after[cell.key]
        ),
        unserved=explanation.unserved(),
        below_minimum=explanation.below_minimum(),
        reason=solved.reason,
    )


def _unchanged(facts: PlacementFacts, now_s: float, complaint: str) -> Placement:
    return Placement(
        at_s=now_s,
        status=PlacementStatus.FAILED,
        solver="none",
        objective_per_hour=None,
        bound_per_hour=None,
        gap=None,
        gpu_cost_per_hour=_present_cost(facts, facts.present),
        entries=tuple(
            PlacementEntry(
                endpoint=Endpoint(model=key.model, region=key.region),
                gpu_type=key.gpu_type,
                before=count,
                after=count,
                reason="no change: no solver answered, the present placement stays",
            )
            for key, count in sorted(facts.present.items())
            if count
        ),
        unserved=(),
        below_minimum=(),
        reason=complaint,
    )


def _present_cost(facts: PlacementFacts, counts: Mapping[EndpointGpu, int]) -> float:
    return math.fsum(
        count * profile.gpus * facts.gpu_cost_per_hour[key.gpu_type]
        for key, count in counts.items()
        for at, profile in facts.profiles.items()
        if (at.model, at.gpu_type) == (key.model, key.gpu_type)
    )
