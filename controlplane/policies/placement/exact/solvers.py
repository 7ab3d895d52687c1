"""Solving a placement program: HiGHS in this process, CBC if HiGHS fails, with the status that they themselves report.

PuLP reports "optimal" also when a time limit cut the search short, so status, bound and gap are read from HiGHS.
CBC through PuLP reports only whether it finished.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pulp

from controlplane.policies.placement.decision import PlacementStatus
from controlplane.policies.placement.facts import PlacementSettings

SEED = 1


EXACT_SHARE = 0.5
"""Of the time limit, for the integer program. The rest is for the search by prices, which answers within seconds at
the sizes that the program takes (1.4 s for 400 cells on one core).
"""


class SolverError(Exception):
    """A solver is missing or failed; the message says which."""


class NothingFoundError(SolverError):
    """A solver that works found no placement: every program has one, so its share of the time limit was over."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """How a solver ended, and its message. The solution is in the program's variables."""

    status: PlacementStatus
    solver: str
    bound: float | None
    message: str


Solve = Callable[[Any, PlacementSettings, float], Solved]


def solve_highs(problem: Any, settings: PlacementSettings, gap_abs: float) -> Solved:
    """Solve with HiGHS, one thread and a fixed seed: the same problem ends the same way.

    Raises:
        NothingFoundError: no answer was found within EXACT_SHARE of the time limit.
        SolverError: highspy is missing or failed.
    """
    solver = pulp.HiGHS(
        msg=False,
        timeLimit=EXACT_SHARE * settings.time_limit_s,
        gapRel=0.0,
        gapAbs=gap_abs,
        threads=1,
        random_seed=SEED,
    )
    _run(problem, solver, "HiGHS")
    model = problem.solverModel
    ended = model.modelStatusToString(model.getModelStatus())
    status = _status_of(problem, finished=ended == "Optimal", solver="HiGHS", message=ended)
    bound = float(model.getInfo().mip_dual_bound) + problem.objective.constant  # PuLP keeps the constant to itself
    return Solved(status=status, solver="highs", bound=bound, message=f"HiGHS says {ended!r}")


def solve_cbc(problem: Any, settings: PlacementSettings, gap_abs: float) -> Solved:
    """Solve with the CBC that PuLP ships. Bound and gap stay unknown.

    Raises:
        NothingFoundError: no answer was found within EXACT_SHARE of the time limit.
        SolverError: CBC is missing or failed.
    """
    solver = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        timeLimit=EXACT_SHARE * settings.time_limit_s,
        gapAbs=gap_abs,
        threads=1,
        options=[f"randomSeed {SEED}"],
    )
    _run(problem, solver, "CBC")
    ended = pulp.LpSolution[problem.sol_status]
    status = _status_of(problem, finished=problem.sol_status == pulp.LpSolutionOptimal, solver="CBC", message=ended)
    return Solved(status=status, solver="cbc", bound=None, message=f"CBC says {ended!r}")


SOLVERS: tuple[Solve, ...] = (solve_highs, solve_cbc)


def solve_first(problem: Any, settings: PlacementSettings, gap_abs: float, solvers: tuple[Solve, ...]) -> Solved:
    """The answer of the first solver that works: one that found nothing in time has used up the others' time too.

    Raises:
        NothingFoundError: it found nothing in time.
        SolverError: none works; the message holds each solver's error.
    """
    errors = []
    for solve in solvers:
        try:
            return solve(problem, settings, gap_abs)
        except NothingFoundError:
            raise
        except SolverError as error:
            errors.append(str(error))
    raise SolverError("; ".join(errors) or "no solver is configured")


def _run(problem: Any, solver: Any, name: str) -> None:
    try:
        if not solver.available():
            raise SolverError(f"{name} is not available")
        problem.solve(solver)
    except (pulp.PulpSolverError, OSError, IndexError) as error:
        raise SolverError(f"{name} failed: {error}") from error


def _status_of(problem: Any, *, finished: bool, solver: str, message: str) -> PlacementStatus:
    if finished:
        return PlacementStatus.OPTIMAL
    values = [variable.varValue for variable in problem.variables()]
    if problem.sol_status == pulp.LpSolutionIntegerFeasible and None not in values:
        return PlacementStatus.TIME_LIMIT
    raise NothingFoundError(f"{solver} found no placement: {message}")
