"""Solving the integer program of a whole problem by HiGHS, within a bound of work.

HiGHS asks whether to go on at points of its search that depend on the program alone, and needs about as much time from
one to the next as the program has rows and columns. So work is counted in questions times rows and columns: what is
not proven within its bound ends at the same point on every machine. A machine too slow to get there within its share of
the time limit ends by the clock.
"""

import itertools
import math
from dataclasses import dataclass

import highspy

from controlplane.policies.placement.decision import PlacementStatus
from controlplane.policies.placement.exact.program import Program, least_cost
from controlplane.policies.placement.facts import PlacementSettings
from controlplane.policies.placement.grid import Answer, Grid
from controlplane.policies.placement.highs import run_program

EXACT_SHARE = 0.5
"""Of the time limit, for the integer program. The rest is for the search by prices, which answers within seconds at
the sizes that the program takes (1.4 s for 400 cells on one core).
"""
WORK_PER_S = 300_000
"""Questions times rows and columns for each second of that share; one core does three to five times as much."""

_ENDS = {
    highspy.HighsModelStatus.kOptimal: (PlacementStatus.OPTIMAL, "reached the gap asked for"),
    highspy.HighsModelStatus.kInterrupt: (PlacementStatus.BOUNDED, "did all the work allowed"),
    highspy.HighsModelStatus.kTimeLimit: (PlacementStatus.TIME_LIMIT, "used up its share of the time limit"),
}


@dataclass(frozen=True, kw_only=True)
class Solved:
    """How a solver ended, the bound that it proved, and its message."""

    status: PlacementStatus
    solver: str
    bound: float
    message: str


def solve_exactly(grid: Grid, settings: PlacementSettings) -> tuple[Answer | None, Solved]:
    """Solve a grid as one integer program. The answer is None if HiGHS found none, though every program has one: it
    ended too early, or failed.
    """
    program, share_s, asked = Program(grid), EXACT_SHARE * settings.time_limit_s, itertools.count(1)
    problem = program.highs
    most = WORK_PER_S * share_s / (problem.getNumRow() + problem.getNumCol())
    gap_abs = settings.gap * least_cost(grid)
    run_program(problem, lambda: next(asked) > most, time_limit=share_s, mip_abs_gap=gap_abs)
    ended, info = problem.getModelStatus(), problem.getInfo()
    failed = PlacementStatus.FAILED, f"failed: {problem.modelStatusToString(ended)}"
    status, how = _ENDS.get(ended, failed)
    bound = float(info.mip_dual_bound) if status != PlacementStatus.FAILED else -math.inf
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    solved = Solved(status=status, solver="highs", bound=bound, message=f"HiGHS {how}")
    return program.answer() if found else None, solved
