"""What all pictures of simulations share: columns of a result over time, thinned, and their time axis."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ops.plots.panels import add_legend
from ops.simulator.results.results import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = npt.NDArray[np.float64]

POINTS_MAX = 400
"""Points of a line: more are not seen, but make a large file."""
_UNITS = ((3 * 86_400.0, 86_400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (0.0, 60.0, "minutes"))


def add_up(columns: Sequence[Sequence[float | int | None]]) -> FloatArray:
    """Columns added up step by step; NaN where none of them is known."""
    table = np.array([values_of(column) for column in columns])
    known = ~np.isnan(table)
    return np.where(known.any(axis=0), np.where(known, table, 0.0).sum(axis=0), np.nan)


def values_of(column: Sequence[float | int | None]) -> FloatArray:
    """A column; NaN = not known."""
    return np.array([math.nan if value is None else float(value) for value in column])


def thin(
    series: Series,
    column: "Sequence[float | int | None] | FloatArray",
    take: Callable[[FloatArray], object],
    unit_s: float | None = None,
) -> tuple[FloatArray, FloatArray]:
    """When steps begin in the axis' unit, and their values; many steps become one by `take`. The last value is there
    twice: at the last step's beginning and at its end.
    """
    values = column if isinstance(column, np.ndarray) else values_of(column)
    each = max(1, math.ceil(len(values) / POINTS_MAX))
    groups = [values[first : first + each] for first in range(0, len(values), each)]
    thinned: FloatArray = np.array([np.nan if np.isnan(group).all() else take(group) for group in groups], dtype=float)
    edges_s: FloatArray = series.start_s + series.step_s * np.minimum(each * np.arange(len(groups) + 1), len(values))
    return edges_s / (unit_s or unit_of(series)[0]), np.append(thinned, thinned[-1:])


def draw_bars(
    axes: "Axes", labels: Sequence[str], columns: Sequence[tuple[str, str, Sequence[float]]], name: str
) -> None:
    """Two horizontal bars for each label. `columns`: name, colour and shares of 1 of each bar; NaN is drawn as "-"."""
    places = np.arange(len(labels))[::-1]
    for offset, (label, colour, shares) in zip((0.2, -0.2), columns, strict=True):
        bars = axes.barh(places + offset, [100 * share for share in shares], 0.38, color=colour, label=label)
        texts = ["-" if math.isnan(share) else f"{share:.2%}" for share in shares]
        axes.bar_label(bars, texts, padding=3, fontsize=7.5, color="#444444")
    axes.set_yticks(places, labels)
    axes.set_xlim(0, 108)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel(f"{name}, %")
    axes.grid(visible=False, axis="y")
    add_legend(axes)


def unit_of(series: Series) -> tuple[float, str]:
    """Seconds of a unit of the time axis, and its name."""
    return next((unit_s, name) for least_s, unit_s, name in _UNITS if span_s(series) >= least_s)


def span_s(series: Series) -> float:
    """From the first step's beginning to the last one's end."""
    columns = [one.demand for one in series.endpoints] + [one.ended for one in series.tiers]
    return series.step_s * max((len(column) for column in columns), default=0)


def finish_time_axis(axes: "Axes", series: Series) -> None:
    """Its name and unit; the line begins and ends with the series."""
    unit_s, name = unit_of(series)
    axes.set_xlabel(f"simulated time, {name}")
    axes.set_xlim(series.start_s / unit_s, (series.start_s + span_s(series)) / unit_s)
