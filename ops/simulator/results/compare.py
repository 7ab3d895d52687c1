"""Two results side by side: every figure that both have, how they differ, and which is better where that is plain."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from dataplane.protocol.tiers import Tier
from ops.plots.pages import Cell, page, section, table
from ops.plots.panels import add_legend, draw_svg
from ops.simulator.results.drawing import (
    FloatArray,
    add_up,
    draw_bars,
    finish_time_axis,
    span_s,
    thin,
    unit_of,
    values_of,
)
from ops.simulator.results.report import wasted_share
from ops.simulator.results.results import GpuTotals, Quantiles, Result, Row, State, held_hours

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
        columns = [
            (name, colour, [of.get(tier, math.nan) for tier in tiers])
            for name, colour, of in zip(names, BOTH_COLOURS, values, strict=True)
        ]
        draw_bars(figure.subplots(), tiers, columns, "service attainment")

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


Better = Literal["more", "less", ""]
Unit = Literal["", "%", "s", "h", "$"]
_TELLING = 0.005
"""Differences under so large a share of the greater figure are not coloured."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure of both runs; None: a run has none. `better`: more of it, less of it, or neither."""

    part: str
    name: str
    unit: Unit
    better: Better
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """The second less the first, in the figure's unit."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def share(self) -> float | None:
        """The difference as a share of the first; None where that is 0."""
        return None if self.difference is None or not self.a else self.difference / abs(self.a)

    @property
    def verdict(self) -> str:
        """Whether the second is good or bad against the first; empty: neither, or too close."""
        if self.difference is None or self.a is None or self.b is None or not self.better:
            return ""
        if abs(self.difference) <= _TELLING * max(abs(self.a), abs(self.b)):
            return ""
        return "good" if (self.difference > 0) == (self.better == "more") else "bad"

    def document(self) -> dict[str, Any]:
        """The figure as JSON. Shares are of 1, whatever is shown."""
        return {
            "part": self.part,
            "name": self.name,
            "unit": self.unit,
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "share": self.share,
        }

    def texts(self) -> tuple[str, str, str, str]:
        """Both figures, the difference and its share, for people."""
        difference = "" if self.difference is None else _text(self.difference, self.unit, sign="+")
        if self.unit == "%":
            difference = difference.replace("%", "pt")
        share = "" if self.share is None or self.unit == "%" else f"{self.share:+.1%}"
        return _text(self.a, self.unit), _text(self.b, self.unit), difference, share


def compare(a: Result, b: Result) -> list[Line]:
    """All figures, part by part; those that neither has, or that are 0 in both, are left out."""
    lines = [*_whole(a, b), *_rows("tier", a.tiers, b.tiers), *_rows("model", a.rows, b.rows)]
    return [line for line in lines if line.a or line.b]


def about(result: Result) -> str:
    """What tells a run from others."""
    strategy = f", {result.strategy}" if result.strategy else ""
    return f"{result.scenario}{strategy}, seed {result.seed}"


def compare_page(names: tuple[str, str], a: Result, b: Result) -> str:
    """Both as one HTML page. `names`: what to call them."""
    parts = [
        section(
            "Figures", "Green: the second is better. Red: it is worse. Points (pt) are of 100.", _table(names, a, b)
        ),
        section(
            "Attainment by tier",
            "Service: mean share of a request's time in which no token was overdue.",
            attainment_of_both(names, a, b),
        ),
        section("Over time", "The whole fleet, and the slowest tier's first tokens.", both_over_time(names, a, b)),
    ]
    below = "; ".join(f"{name}: {about(one)}" for name, one in zip(names, (a, b), strict=True))
    footer = f"Event logs {a.event_log_hash} and {b.event_log_hash}"
    return page(f"{names[0]} and {names[1]}", below, parts, footer)


def _whole(a: Result, b: Result) -> Iterator[Line]:
    def line(name: str, unit: Unit, better: Better, of: Callable[[Result], float | None]) -> Line:
        return Line(part="all", name=name, unit=unit, better=better, a=of(a), b=of(b))

    yield line("simulated", "s", "", lambda one: one.simulated_s)
    yield line("requests", "", "", lambda one: one.requests)
    yield line("failed or refused", "", "less", lambda one: sum(one.failures.values()))
    yield line("service attainment", "%", "more", lambda one: one.service_attainment)
    yield line("token attainment", "%", "more", lambda one: one.token_attainment)
    yield line("cost", "$", "less", lambda one: one.totals.cost)
    for state in get_args(State):
        better: Better = "less" if state in ("warming", "draining") else ""
        yield line(f"GPU hours {state}", "h", better, partial(_hours_in, state))
    gpu_types = sorted({*a.totals.gpu_types, *b.totals.gpu_types})
    for gpu_type in gpu_types if len(gpu_types) > 1 else ():
        yield line(f"GPU hours on {gpu_type}", "h", "", partial(_hours_on, gpu_type))
        yield line(f"cost of {gpu_type}", "$", "", partial(_cost_of, gpu_type))
    yield line("GPU hours, all but spot", "h", "less", lambda one: held_hours(one.totals.gpu_hours))
    yield line("endpoint hours in pools", "h", "", _pooled_hours)
    yield line("GPU hours warming, share", "%", "less", lambda one: wasted_share(one.totals))
    yield line("slots busy", "%", "", lambda one: one.busy_share)
    yield line("instances asked for", "", "less", lambda one: one.totals.scale_outs)
    yield line("instances let go", "", "", lambda one: one.totals.scale_ins)
    yield line("asked for without room", "", "less", lambda one: one.totals.unplaced)
    yield line("model switches", "", "less", lambda one: one.totals.switches)
    yield line("node failures", "", "", lambda one: one.totals.node_failures)
    yield line("requests interrupted", "", "less", lambda one: one.totals.interrupted)


def _hours_in(state: State, one: Result) -> float:
    return one.totals.gpu_hours.get(state, 0.0)


def _hours_on(gpu_type: str, one: Result) -> float:
    return held_hours(_on(one, gpu_type).gpu_hours)


def _cost_of(gpu_type: str, one: Result) -> float:
    return _on(one, gpu_type).cost


def _on(result: Result, gpu_type: str) -> GpuTotals:
    return result.totals.gpu_types.get(gpu_type, GpuTotals(gpu_hours={}, cost=0.0))


def _pooled_hours(one: Result) -> float:
    return sum(states.get("pooled", 0.0) for states in one.totals.instance_hours.values())


_OF_ROWS: Sequence[tuple[str, Unit, Better, Callable[[Row], float | None]]] = (
    ("requests", "", "", lambda row: row.requests),
    ("service attainment", "%", "more", lambda row: row.service_attainment),
    ("first token late", "%", "less", lambda row: row.ttft_violations),
    ("TTFT p95", "s", "less", lambda row: _p95(row.ttft_s)),
    ("TBT p95", "s", "less", lambda row: _p95(row.tbt_mean_s)),
)


def _rows(part: str, a: Sequence[Row], b: Sequence[Row]) -> Iterator[Line]:
    before, after = {_key(row): row for row in a}, {_key(row): row for row in b}
    for key in sorted({*before, *after}):
        rows = (before.get(key), after.get(key))
        name = " ".join(word for word in key if word)
        for what, unit, better, of in _OF_ROWS:
            one, other = (None if row is None else of(row) for row in rows)
            yield Line(part=part, name=f"{name}: {what}", unit=unit, better=better, a=one, b=other)


def _key(row: Row) -> tuple[str, str]:
    return row.model or "", row.tier


def _p95(quantiles: Quantiles | None) -> float | None:
    return None if quantiles is None else quantiles.p95


def _table(names: tuple[str, str], a: Result, b: Result) -> str:
    headers = [Cell(text="", word=True), *(Cell(text=name) for name in (*names, "difference", "share"))]
    return table(headers, [_cells(line) for line in compare(a, b)])


def _cells(line: Line) -> list[Cell]:
    a, b, difference, share = line.texts()
    return [
        Cell(text=line.name, word=True),
        Cell(text=a),
        Cell(text=b),
        Cell(text=difference, verdict=line.verdict),
        Cell(text=share, verdict=line.verdict),
    ]


def _text(value: float | None, unit: Unit, *, sign: Literal["+", ""] = "") -> str:
    if value is None:
        return "-"
    if unit == "%":
        return f"{100 * value:{sign}.2f} %"
    if unit in ("s", "h"):
        return f"{value:{sign},.0f} {unit}" if abs(value) >= 1000 else f"{value:{sign}.4g} {unit}"
    if unit == "$":
        return f"{value:{sign},.2f} $"
    return f"{value:{sign},.0f}"
