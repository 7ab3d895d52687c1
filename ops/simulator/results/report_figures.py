"""The pictures of a report, as SVG: what a planner looks at, drawn from a result and nothing else.

Each takes what it draws and gives an SVG element, or None where the run has nothing of the kind.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ops.plots.panels import ACTUAL, FORECAST, add_legend, draw_svg
from ops.simulator.results.drawing import FloatArray, add_up, draw_bars, finish_time_axis, thin, values_of
from ops.simulator.results.results import EndpointSeries, Result, Series, State

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ENDPOINTS_MAX = 4
"""Endpoints with a panel of their own: the busiest; all of them are in the first panel, added up."""
LINES_MAX = 6
"""Lines of one panel."""
ROWS_MAX = 30
"""Rows of bars or of a heat map."""

STATE_COLOURS: Mapping[State, str] = {
    "serving": "#0072b2",
    "pooled": "#56b4e9",
    "warming": "#e69f00",
    "draining": "#999999",
    "spot": "#7fc8a9",
}
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
TIER_COLOURS = {"IW-F": "#d55e00", "IW-N": "#0072b2", "NIW": "#009e73"}
SERVICE, TOKEN = "#0072b2", "#9ecae1"


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
        _draw_planned(held, series, [one.planned for one in series.pools], "planned for pools")
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


def attainment(result: Result) -> str | None:
    """Bars of both attainments, by tier over all models, and below them by model and tier, the worst first."""
    rows = [row for row in result.rows if row.requests]
    worst = sorted(rows, key=lambda row: row.service_attainment)[:ROWS_MAX]
    entries = [(f"all models  {row.tier}", row) for row in result.tiers if row.requests]
    if not entries:
        return None
    if len(rows) > 1:
        entries += [(f"{row.model}  {row.tier}", row) for row in worst]

    def paint(figure: "Figure") -> None:
        columns = [
            ("service", SERVICE, [row.service_attainment for _, row in entries]),
            ("token", TOKEN, [row.token_attainment for _, row in entries]),
        ]
        draw_bars(figure.subplots(), [label for label, _ in entries], columns, "attainment")

    return draw_svg(paint, 0.9 + 0.42 * len(entries))


def capacity(result: Result) -> str | None:
    """Demand and forecast over instances and plan: of the fleet, then of the busiest endpoints."""
    series = result.series
    busiest = sorted(series.endpoints, key=lambda one: -sum(one.demand))
    if not busiest or not busiest[0].demand:
        return None
    shown: list[tuple[str, list[EndpointSeries]]] = [(f"All {len(busiest)} endpoints", busiest)]
    if len(busiest) > 1:
        shown += [(f"{one.model} in {one.region}", [one]) for one in busiest[:ENDPOINTS_MAX]]

    def paint(figure: "Figure") -> None:
        grid = figure.subplots(2 * len(shown), 1, sharex=True, height_ratios=[1.0, 1.25] * len(shown), squeeze=False)
        for place, (title, endpoints) in enumerate(shown):
            _demand_panel(grid[2 * place][0], series, title, endpoints)
            _instances_panel(grid[2 * place + 1][0], series, endpoints)
        finish_time_axis(grid[-1][0], series)

    return draw_svg(paint, 3.6 * len(shown) + 0.3)


def utilization(result: Result) -> str | None:
    """A heat map: endpoints by time; grey where nothing serves."""
    series = result.series
    rows = [one for one in series.endpoints if any(value is not None for value in one.utilization)]
    if not rows:
        return None
    rows = sorted(rows, key=lambda one: -float(np.nanmean(values_of(one.utilization))))[:ROWS_MAX]
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - heavy

    colours = LinearSegmentedColormap.from_list("load", ["#eaf3fb", "#6baed6", "#08306b", "#d7301f"])

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        times, _ = thin(series, rows[0].utilization, np.nanmean)
        table = np.array([thin(series, one.utilization, np.nanmean)[1][:-1] for one in rows])
        image = axes.imshow(
            100 * table, aspect="auto", cmap=colours, vmin=0, vmax=100, interpolation="nearest",
            extent=(times[0], times[-1], len(rows) - 0.5, -0.5),
        )  # fmt: skip
        axes.set_facecolor("#c9ccd1")
        axes.set_yticks(range(len(rows)), [f"{one.model} in {one.region}" for one in rows])
        axes.grid(visible=False)
        finish_time_axis(axes, series)
        figure.colorbar(image, ax=axes, label="memory utilization, %", pad=0.01, fraction=0.03)

    return draw_svg(paint, 1.1 + 0.3 * len(rows))


def first_tokens(result: Result) -> str | None:
    """The 95th percentile of TTFT, and requests that ended, by tier."""
    series = result.series
    tiers = [tier for tier in series.tiers if sum(tier.ended)]
    if not tiers:
        return None
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415 - heavy

    def paint(figure: "Figure") -> None:
        late, ended = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 1.0])
        for tier in tiers:
            colour = TIER_COLOURS.get(tier.tier, ACTUAL)
            late.plot(*thin(series, tier.ttft_p95_s, np.nanmax), color=colour, linewidth=1.2, label=tier.tier)
            times, counts = thin(series, tier.ended, np.nanmean)
            ended.plot(times, counts * 60 / series.step_s, color=colour, linewidth=1.2)
        late.set_yscale("log")
        late.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        late.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        late.yaxis.set_minor_formatter(NullFormatter())
        late.set_ylabel("TTFT p95, s")
        ended.set_ylabel("ended per minute")
        ended.set_ylim(bottom=0)
        add_legend(late)
        finish_time_axis(ended, series)

    return draw_svg(paint, 4.4)


def queues(result: Result) -> str | None:
    """Deferred requests that wait, and the age of the oldest, by model."""
    series = result.series
    longest = sorted((one for one in series.queues if any(one.waiting)), key=lambda one: -max(one.age_s))[:LINES_MAX]
    if not longest:
        return None

    def paint(figure: "Figure") -> None:
        waiting, age = figure.subplots(2, 1, sharex=True)
        for one, colour in zip(longest, LINE_COLOURS, strict=False):
            waiting.plot(*thin(series, one.waiting, np.nanmax), color=colour, linewidth=1.2, label=one.model)
            times, ages_s = thin(series, one.age_s, np.nanmax)
            age.plot(times, ages_s / 60, color=colour, linewidth=1.2)
        waiting.set_ylabel("requests waiting")
        age.set_ylabel("age of the oldest, min")
        for axes in (waiting, age):
            axes.set_ylim(bottom=0)
        add_legend(waiting)
        finish_time_axis(age, series)

    return draw_svg(paint, 4.2)


def hours(result: Result) -> str | None:
    """Instance-hours by model and state."""
    models = {name: states for name, states in result.totals.instance_hours.items() if sum(states.values()) > 0}
    if not models:
        return None
    largest = sorted(models, key=lambda name: -sum(models[name].values()))[:ROWS_MAX]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        places = np.arange(len(largest))[::-1]
        left = np.zeros(len(largest))
        for state, colour in STATE_COLOURS.items():
            widths = np.array([models[name].get(state, 0.0) for name in largest])
            if widths.any():
                axes.barh(places, widths, 0.6, left=left, color=colour, label=state)
            left += widths
        for place, name, total in zip(places, largest, left, strict=True):
            wasted = models[name].get("warming", 0.0) / total
            axes.annotate(
                f"{total:,.1f} h, {wasted:.1%} warming", (total, place), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=8, color="#444444",
            )  # fmt: skip
        axes.set_yticks(places, largest)
        axes.set_xlim(0, float(left.max()) * 1.25)
        axes.set_xlabel("instance-hours")
        axes.grid(visible=False, axis="y")
        add_legend(axes)

    return draw_svg(paint, 1.1 + 0.36 * len(largest))


def _demand_panel(axes: "Axes", series: Series, title: str, endpoints: Sequence[EndpointSeries]) -> None:
    from matplotlib.ticker import EngFormatter  # noqa: PLC0415 - heavy

    times, demand = thin(series, add_up([one.demand for one in endpoints]), np.nanmean)
    axes.fill_between(times, demand, step="post", color=ACTUAL, alpha=0.12, linewidth=0)
    axes.step(times, demand, where="post", color=ACTUAL, linewidth=1.0, label="demand")
    forecast = add_up([one.forecast for one in endpoints])
    if not np.isnan(forecast).all():
        axes.step(
            *thin(series, forecast, np.nanmean), where="post", color=FORECAST, linewidth=1.3, label="forecast peak"
        )
    axes.set_title(title, fontweight="bold", pad=6)
    axes.set_ylabel("input tokens/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    add_legend(axes)


def _instances_panel(axes: "Axes", series: Series, endpoints: Sequence[EndpointSeries]) -> None:
    states: dict[State, FloatArray] = {
        "serving": add_up([kind for one in endpoints for kind in one.serving.values()] or [[0.0] * _steps(series)]),
        "pooled": add_up([one.pooled for one in endpoints]),
        "warming": add_up([one.warming for one in endpoints]),
        "draining": add_up([one.draining for one in endpoints]),
        "spot": add_up([one.spot for one in endpoints]),
    }
    add_stack(axes, series, states)
    _draw_planned(axes, series, [one.planned for one in endpoints], "planned")
    axes.set_ylabel("instances")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)
    add_legend(axes)


def add_stack(axes: "Axes", series: Series, states: Mapping[State, FloatArray]) -> None:
    """Counts by state, one above the other."""
    below: FloatArray | None = None
    for state, counts in states.items():
        times, values = thin(series, counts, np.nanmean)
        top = values if below is None else below + values
        if values.any():
            floor = np.zeros_like(top) if below is None else below
            axes.fill_between(
                times, floor, top, step="post", color=STATE_COLOURS[state], alpha=0.85, linewidth=0, label=state
            )
        below = top


def _draw_planned(axes: "Axes", series: Series, columns: Sequence[Sequence[int | None]], label: str) -> None:
    planned = add_up(columns)
    if not np.isnan(planned).all():
        times, counts = thin(series, planned, np.nanmax)
        axes.step(times, counts, where="post", color=ACTUAL, linewidth=1.1, linestyle="--", label=label)


def _steps(series: Series) -> int:
    return len(series.endpoints[0].demand) if series.endpoints else 0
