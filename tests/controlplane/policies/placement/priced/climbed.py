"""Problems with the prices that prove most of mixed configurations."""

from functools import partial
from typing import Any

from controlplane.policies.placement.grid import Grid
from controlplane.policies.placement.priced.dual import Dual, climb
from controlplane.policies.placement.priced.neighbourhood import neighbourhood_columns
from controlplane.policies.placement.priced.tables import Tables, build_tables


def climbed(
    grid: Grid, *, rounds: int, spare: float, each_max: int, least_gain: float = 0.0
) -> tuple[Tables, Dual, Any]:
    """The tables, the dual after so many rounds, and what finds the columns near the best at a dual, where nothing
    stands anywhere.
    """
    tables = build_tables(grid)
    dual = climb(tables, rounds, least_gain, lambda: False)
    nothing = dual.columns.at(dual.columns.first)
    return tables, dual, partial(neighbourhood_columns, tables, incumbent=nothing, spare=spare, each_max=each_max)
