"""Pictures of two runs together; see `report_figures`."""

import math
from typing import TYPE_CHECKING

import numpy as np

from dataplane.protocol.tiers import Tier
from ops.simulator.results.drawing import (
    FloatArray,
    add_legend,
    add_up,
    draw_svg,
    finish_time_axis,
    span_s,
    thin,
    unit_of,
    values_of,
)
from ops.simulator.results.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOTH_COLOURS = ("#0072b2", "#d55e00")


def attainment_of_both(names: tuple[str, str], a: Result, b: Result) -> str | None:
    """Service attainment by tier: a bar for each run."""
    values = [{row.tier: row.service_attainment for row in one.tiers if row.requests} for one in (a, b)]
    tiers = sorted({*values[0], *values[1]})
    if not tiers:
        return None

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        places = np.arange(len(tiers))[::-1]
        for offset, name, colour, of in zip((0.2, -0.2), names, BOTH_COLOURS, values, strict=True):
            shown = [100 * of.get(tier, math.nan) for tier in tiers]
            bars = axes.barh(places + offset, shown, 0.38, color=colour, label=name)
            texts = ["-" if math.isnan(value) else f"{value:.2f} %" for value in shown]
            axes.bar_label(bars, texts, padding=3, fontsize=7.5, color="#444444")
        axes.set_yticks(places, tiers)
        axes.set_xlim(0, 108)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("service attainment, %")
        axes.grid(visible=False, axis="y")
        add_legend(axes)

    return draw_svg(paint, 1.0 + 0.5 * len(tiers))


def both_over_time(names: tuple[str, str], a: Result, b: Result) -> str | None:
    """Demand, GPUs that are held, and the slowest tier's TTFT p95, of both runs."""
    runs = [one for one in (a, b) if one.series.endpoints]
    if len(runs) < 2:
        return None
    longer = max((one.series for one in runs), key=span_s)

    def paint(figure: "Figure") -> None:
        demand, held, late = figure.subplots(3, 1, sharex=True)
        for name, colour, one in zip(names, BOTH_COLOURS, (a, b), strict=True):
            series, endpoints = one.series, one.series.endpoints
            counts = add_up(
                [[0.0] * len(series.switches), *(column for state, column in series.gpus.items() if state != "spot")]
            )
            line = {"color": colour, "linewidth": 1.2, "where": "post"}
            unit = unit_of(longer)[0]
            for axes, column, take in (
                (demand, add_up([each.demand for each in endpoints]), np.nanmean),
                (held, counts, np.nanmean),
                (late, _slowest(one), np.nanmax),
            ):
                axes.step(*thin(series, column, take, unit), label=name, **line)
        for axes, words in ((demand, "input tokens/s"), (held, "GPUs held"), (late, "TTFT p95, s")):
            axes.set_ylabel(words)
            axes.set_ylim(bottom=0)
        add_legend(demand)
        finish_time_axis(late, longer)

    return draw_svg(paint, 6.0)


def _slowest(result: Result) -> FloatArray:
    """The largest of the tiers' TTFT p95, step by step; NIW, which may wait for hours, is left out."""
    columns = [values_of(tier.ttft_p95_s) for tier in result.series.tiers if tier.tier != Tier.NIW]
    return np.fmax.reduce(columns) if columns else np.array([])
