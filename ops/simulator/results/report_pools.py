"""The picture of pools that come and go with the plans; see `report_figures`."""

from typing import TYPE_CHECKING

import numpy as np

from ops.plots.panels import CAME
from ops.simulator.results.drawing import add_legend, add_up, draw_svg, finish_time_axis, thin, values_of
from ops.simulator.results.report_figures import STATE_COLOURS, TIER_COLOURS, add_stack
from ops.simulator.results.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pools(result: Result) -> str | None:
    """GPUs that are held, by what for, and what the plans give to pools; pooled endpoints that are served; switches."""
    series = result.series
    if not series.pools:
        return None

    def paint(figure: "Figure") -> None:
        held, endpoints, switches = figure.subplots(3, 1, sharex=True, height_ratios=[1.8, 1.0, 1.0])
        add_stack(
            held, series, {state: values_of(series.gpus[state]) for state in STATE_COLOURS if state in series.gpus}
        )
        planned = add_up([one.planned for one in series.pools])
        if not np.isnan(planned).all():
            line = {"color": CAME, "linewidth": 1.1, "linestyle": "--", "label": "planned for pools"}
            held.step(*thin(series, planned, np.nanmax), where="post", **line)
        counts = add_up([one.pooled for one in series.endpoints])
        endpoints.step(*thin(series, counts, np.nanmean), where="post", color=STATE_COLOURS["pooled"], linewidth=1.3)
        times, per_step = thin(series, series.switches, np.nanmean)
        switches.step(times, per_step * 60 / series.step_s, where="post", color=TIER_COLOURS["IW-F"], linewidth=1.0)
        for axes, words in ((held, "GPUs"), (endpoints, "pooled endpoints"), (switches, "switches per minute")):
            axes.set_ylabel(words)
            axes.set_ylim(bottom=0)
        add_legend(held)
        finish_time_axis(switches, series)

    return draw_svg(paint, 6.4)
