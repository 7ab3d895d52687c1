"""A plan as a picture: demand until it was made, its forecast, the capacity it places, and actual demand.

`draw_plan` takes nothing but numbers, so that it serves commands, tests and the simulator. From the admin API:

    history, actual     GET /admin/demand: the points before the plan's origin, and from the origin on
    forecast            GET /admin/forecasts?origin_s=...: each window of `path` (q50), and the same raised to the upper
                        quantile (`path` * peak_upper / peak_q50); a window lasts 3600 s / number of windows
    capacity            GET /admin/plans/{id}: instances before and after, times the profile's tokens per second of
                        one instance, summed over GPU types: one `Capacity` with `before` until the plan's window
                        begins, one with `after` for the window. `instances` is written at the step

Six to twelve hours of history read best. For all endpoints of a model, or of the fleet, add panels up (`total_panel`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ops.plots.panels import (
    ACTUAL,
    CAPACITY,
    DAY_S,
    FORECAST,
    HISTORY,
    NOW,
    PANELS_MAX,
    Curve,
    PlotError,
    draw_curve,
    finish_panel,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Band:
    """The forecast of one window: [start_s, end_s) in Unix time, rates in input tokens per second."""

    start_s: float
    end_s: float
    q50: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What is placed in [start_s, end_s): input tokens per second that it serves, and of how many instances it is."""

    start_s: float
    end_s: float
    tokens_per_s: float
    instances: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanPanel:
    """One endpoint, or several added up.

    Attributes:
        title: for example "llama-8b in us-east".
        origin_s: Unix time from which was forecast; a line is drawn there.
        history: demand before the origin; None = nothing known.
        actual: demand from the origin on; None = none yet.
        forecast: windows, ascending; may be empty where the endpoint has no forecast.
        capacity: steps, ascending, from before the plan to its end; may be empty.
        note: a few words behind the title, such as the plan's reason for this endpoint.
    """

    title: str
    origin_s: float
    history: Curve | None
    actual: Curve | None
    forecast: Sequence[Band]
    capacity: Sequence[Capacity]
    note: str = ""


def draw_plan(panels: Sequence[PlanPanel], path: Path, *, title: str, quantile: float) -> int:
    """Draw panels under each other in the given order, and write PNG, SVG or PDF by the path's ending.

    Call `ops.plots.panels.check_path(path)` first where gathering the numbers takes long.

    Args:
        panels: one or more; only the first `PANELS_MAX` are drawn, so put those that matter first.
        path: the file to write.
        title: of the picture, for example "Plan plan_01 for 2024-11-14 15:00Z".
        quantile: which one `Band.upper` is.

    Returns:
        How many panels are left out.

    Raises:
        PlotError: there is no panel, a panel holds nothing at all, or the file cannot be written.
    """
    if not panels:
        raise PlotError("there is no endpoint to draw")
    drawn, left_out = panels[:PANELS_MAX], len(panels[PANELS_MAX:])
    note = f" (the first {len(drawn)} of {len(panels)})" if left_out else ""
    figure, rows = new_figure(len(drawn), title + note)
    for axes, panel in zip(rows, drawn, strict=True):
        _draw(axes, panel, quantile)
    save(figure, path)
    return left_out


def total_panel(panels: Sequence[PlanPanel], title: str) -> PlanPanel:
    """Panels of one plan added up: demand bucket by bucket, forecasts and capacity step by step.

    The sum of upper quantiles is above the upper quantile of the sum: peaks do not all come at once.

    Args:
        panels: one or more, of one origin and of equal buckets. A bucket counts what is known in it.
        title: of the sum.
    """
    bands = [band for panel in panels for band in panel.forecast]
    steps = [step for panel in panels for step in panel.capacity]
    return PlanPanel(
        title=title,
        origin_s=panels[0].origin_s,
        history=_total_curve([panel.history for panel in panels if panel.history is not None]),
        actual=_total_curve([panel.actual for panel in panels if panel.actual is not None]),
        forecast=[
            Band(
                start_s=start_s,
                end_s=end_s,
                q50=sum(band.q50 for band in bands if (band.start_s, band.end_s) == (start_s, end_s)),
                upper=sum(band.upper for band in bands if (band.start_s, band.end_s) == (start_s, end_s)),
            )
            for start_s, end_s in sorted({(band.start_s, band.end_s) for band in bands})
        ],
        capacity=[
            Capacity(
                start_s=start_s,
                end_s=end_s,
                tokens_per_s=sum(step.tokens_per_s for step in steps if (step.start_s, step.end_s) == (start_s, end_s)),
                instances=sum(step.instances for step in steps if (step.start_s, step.end_s) == (start_s, end_s)),
            )
            for start_s, end_s in sorted({(step.start_s, step.end_s) for step in steps})
        ],
    )


def _total_curve(curves: Sequence[Curve]) -> Curve | None:
    if not curves:
        return None
    starts = np.concatenate([curve.start_s for curve in curves])
    rates = np.concatenate([curve.tokens_per_s for curve in curves])
    known = ~np.isnan(rates)
    start_s, places = np.unique(starts, return_inverse=True)
    sums, counts = np.zeros(len(start_s)), np.zeros(len(start_s))
    np.add.at(sums, places[known], rates[known])
    np.add.at(counts, places[known], 1)
    totals = np.where(counts > 0, sums, np.nan)
    return Curve(start_s=start_s, tokens_per_s=totals, bucket_s=curves[0].bucket_s)


def _draw(axes: "Axes", panel: PlanPanel, quantile: float) -> None:
    if panel.history is not None:
        draw_curve(axes, panel.history, "history", HISTORY)
    if panel.actual is not None:
        draw_curve(axes, panel.actual, "actual demand", ACTUAL)
    for place, band in enumerate(panel.forecast):
        span = [band.start_s / DAY_S, band.end_s / DAY_S]
        label = f"forecast, q50 to q{100 * quantile:g}" if place == 0 else None
        axes.fill_between(span, [band.q50] * 2, [band.upper] * 2, color=FORECAST, alpha=0.3, linewidth=0, label=label)
        axes.plot(span, [band.q50] * 2, color=FORECAST, linewidth=1.4, label="q50" if place == 0 else None)
    _draw_capacity(axes, panel.capacity)
    axes.axvline(panel.origin_s / DAY_S, color=NOW, linewidth=0.9, linestyle=":", label="planned here")
    first_s, end_s = _span(panel)
    title = f"{panel.title}   {panel.note}" if panel.note else panel.title
    finish_panel(axes, title, first_s=first_s, end_s=end_s)


def _draw_capacity(axes: "Axes", steps: Sequence[Capacity]) -> None:
    for place, step in enumerate(steps):
        span = [step.start_s / DAY_S, step.end_s / DAY_S]
        label = "capacity placed" if place == 0 else None
        axes.plot(span, [step.tokens_per_s] * 2, color=CAPACITY, linewidth=1.6, label=label)
        if place:
            earlier = steps[place - 1].tokens_per_s
            axes.plot([span[0]] * 2, [earlier, step.tokens_per_s], color=CAPACITY, linewidth=1.6)
        words = f"{step.instances} instance{'' if step.instances == 1 else 's'}"
        middle = (step.start_s + step.end_s) / 2 / DAY_S
        axes.annotate(
            words,
            (middle, step.tokens_per_s),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=CAPACITY,
        )


def _span(panel: PlanPanel) -> tuple[float, float]:
    spans = [(band.start_s, band.end_s) for band in panel.forecast]
    spans += [(step.start_s, step.end_s) for step in panel.capacity]
    for curve in (panel.history, panel.actual):
        if curve is not None and len(curve.start_s):
            spans.append((float(curve.start_s[0]), float(curve.start_s[-1]) + curve.bucket_s))
    if not spans:
        raise PlotError(f"{panel.title}: there is nothing to draw: no demand, no forecast, no capacity")
    return min(first for first, _ in spans), max(end for _, end in spans)
