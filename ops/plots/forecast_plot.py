"""A backtest as a picture: what was known, the hourly forecasts, and actual demand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ops.plots.panels import (
    ACTUAL,
    DAY_S,
    FORECAST,
    HISTORY,
    PANELS_MAX,
    Curve,
    FloatArray,
    draw_curve,
    finish_panel,
    frame_panel,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, eq=False)
class ForecastPanel:
    """One series.

    Attributes:
        title: which series.
        demand: all of it; before the first origin it is drawn as history, after it as actual demand.
        origin_s: shape (origins,), Unix times, ascending.
        horizon_s: how far each forecast reaches.
        peak_q50: shape (origins,), the median of the peak; NaN where nothing was known.
        peak_upper: the same for the upper quantile.
        actual_peak: the same for the actual peak; NaN = a gap.
        error: weighted error of the median, a share of 1; None = no origin with an outcome.
        coverage: share of origins whose peak stayed under the upper quantile.
        pinball: loss of the upper quantile over the mean peak, a share of 1.
    """

    title: str
    demand: Curve
    origin_s: FloatArray
    horizon_s: float
    peak_q50: FloatArray
    peak_upper: FloatArray
    actual_peak: FloatArray
    error: float | None
    coverage: float | None
    pinball: float | None


@dataclass(frozen=True, kw_only=True)
class ReliabilityPanel:
    """The reliability diagram of all series: of `hours` peaks, the share `covered` was at or under each of `levels`.

    `upper`: the level of the upper quantile and its coverage, which is adapted online.
    """

    hours: int
    levels: tuple[float, ...]
    covered: tuple[float, ...]
    upper: tuple[float, float]


def draw_forecasts(
    panels: Sequence[ForecastPanel],
    path: Path,
    *,
    title: str,
    quantile: float,
    reliability: ReliabilityPanel | None = None,
) -> int:
    """Draw series under each other, those with the most demand first, and write PNG, SVG or PDF by the path's ending.

    Args:
        panels: one or more; only the `PANELS_MAX` with the largest peaks are drawn.
        path: the file to write.
        title: of the picture.
        quantile: which one `peak_upper` is.
        reliability: drawn below the series.

    Returns:
        How many are left out.

    Raises:
        PlotError: the file cannot be written.
    """
    ranked = sorted(panels, key=lambda panel: -np.nanmax(panel.demand.tokens_per_s, initial=0.0))
    drawn, left_out = ranked[:PANELS_MAX], len(ranked[PANELS_MAX:])
    note = f" (the {len(drawn)} largest of {len(ranked)} series)" if left_out else ""
    figure, rows = new_figure(len(drawn) + (reliability is not None), title + note)
    for axes, panel in zip(rows, drawn, strict=False):
        _draw(axes, panel, quantile)
    if reliability is not None:
        _draw_reliability(rows[-1], reliability)
    save(figure, path)
    return left_out


def _draw(axes: "Axes", panel: ForecastPanel, quantile: float) -> None:
    origins, demand = panel.origin_s, panel.demand
    end_s = float(origins[-1]) + panel.horizon_s
    first_s = max(float(demand.start_s[0]), float(origins[0]) - max(DAY_S, (end_s - float(origins[0])) / 4))
    known = (demand.start_s >= first_s) & (demand.start_s < origins[0])
    actual = (demand.start_s >= origins[0]) & (demand.start_s < end_s)
    draw_curve(axes, _part(demand, known), "history", HISTORY)
    draw_curve(axes, _part(demand, actual), "actual demand", ACTUAL)
    upper = f"q{100 * quantile:g}"
    for place, origin_s in enumerate(origins):
        if np.isnan(panel.peak_q50[place]):
            continue
        span = [origin_s / DAY_S, (origin_s + panel.horizon_s) / DAY_S]
        low, high = panel.peak_q50[place], panel.peak_upper[place]
        first = place == int(np.flatnonzero(~np.isnan(panel.peak_q50))[0])
        band = f"forecast, q50 to {upper}" if first else None
        axes.fill_between(span, [low, low], [high, high], color=FORECAST, alpha=0.3, linewidth=0, label=band)
        axes.plot(span, [low, low], color=FORECAST, linewidth=1.2, label="q50" if first else None)
    middles = (origins + panel.horizon_s / 2) / DAY_S
    axes.plot(middles, panel.actual_peak, ".", color=ACTUAL, markersize=3, label="actual peak")
    finish_panel(axes, f"{panel.title}   {_scores(panel, upper)}", first_s=first_s, end_s=end_s)


def _draw_reliability(axes: "Axes", panel: ReliabilityPanel) -> None:
    """Covered against requested shares, with the band in which nine of ten samples of so many hours would be."""
    levels = np.linspace(0, 1, 101)
    width = 1.645 * np.sqrt(levels * (1 - levels) / panel.hours)
    axes.fill_between(levels, levels - width, levels + width, color=HISTORY, alpha=0.25, linewidth=0, label="chance")
    axes.plot([0, 1], [0, 1], color=HISTORY, linewidth=1, label="as requested")
    axes.plot(panel.levels, panel.covered, "o-", color=FORECAST, markersize=4, label="distribution of the peak")
    axes.plot(*panel.upper, "D", color=ACTUAL, markersize=6, label="upper quantile")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("requested share of hours")
    axes.set_ylabel("covered share")
    frame_panel(axes, f"Reliability, {panel.hours} hours")


def _part(curve: Curve, where: "np.typing.NDArray[np.bool_]") -> Curve:
    return Curve(start_s=curve.start_s[where], tokens_per_s=curve.tokens_per_s[where], bucket_s=curve.bucket_s)


def _scores(panel: ForecastPanel, upper: str) -> str:
    error = "error unknown" if panel.error is None else f"error {panel.error:.1%}"
    covers = "" if panel.coverage is None else f", {upper} covers {panel.coverage:.1%}"
    return error + covers + ("" if panel.pinball is None else f", pinball loss {panel.pinball:.1%}")
