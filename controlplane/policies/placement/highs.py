"""Linear and mixed-integer programs for HiGHS, one thread and a fixed seed: the same program ends the same way."""

from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray
from scipy import sparse

Floats = NDArray[np.float64]


_OPTIONS = {"output_flag": False, "threads": 1, "random_seed": 1, "mip_rel_gap": 0.0}


def highs_of(problem: pulp.LpProblem) -> highspy.Highs:
    """HiGHS with a problem of PuLP, whose variables know their columns then (`index`). PuLP's own way of running it
    knows neither bounds nor all of the ways in which HiGHS ends.
    """
    solver = pulp.HiGHS(**_OPTIONS)
    solver.createAndConfigureSolver(problem)
    solver.buildSolverModel(problem)
    program: highspy.Highs = problem.solverModel
    program.changeObjectiveOffset(problem.objective.constant)
    return program


def make_program(
    matrix: sparse.spmatrix, cost: Floats, upper: Floats, rows: tuple[Floats, Floats], whole: NDArray[np.bool_]
) -> highspy.Highs:
    """min cost x, with 0 <= x <= `upper` and rows[0] <= matrix x <= rows[1]; x is integer where it must be `whole`."""
    columns = sparse.csc_matrix(matrix)
    lp, kind = highspy.HighsLp(), highspy.HighsVarType
    lp.num_row_, lp.num_col_ = columns.shape
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(len(cost)), upper
    lp.row_lower_, lp.row_upper_ = rows
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = columns.indptr, columns.indices, columns.data
    lp.integrality_ = [kind.kInteger if each else kind.kContinuous for each in whole.tolist()]
    program = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _OPTIONS.items():
        program.setOptionValue(name, value)
    program.passModel(lp)
    return program


def run_program(
    program: highspy.Highs, should_stop: Callable[[], bool], *, start: Floats | None = None, **options: Any
) -> None:
    """Run HiGHS, from the solution `start` if there is one, until it ends or `should_stop` returns True. It is asked at
    points of the search that depend on the program alone.
    """
    for name, value in options.items():
        program.setOptionValue(name, value)
    if start is not None:
        first = highspy.HighsSolution()
        first.col_value = start.tolist()
        program.setSolution(first)
    for callback in (program.cbMipInterrupt, program.cbSimplexInterrupt):
        callback.subscribe(lambda event: event.interrupt() if should_stop() else None)
    program.run()
