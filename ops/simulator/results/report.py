"""The report of a run: one HTML file with what a planner looks at. What a scenario does not have is left out."""

from collections.abc import Iterable

from ops.plots.pages import Cell, cards, page, section, table
from ops.simulator.results import report_figures as figures
from ops.simulator.results.results import Quantiles, Result, Row, Totals, held_hours

START_NAMES = {
    "present": "there at the beginning",
    "revived": "taken back while draining",
    "spot_same": "spot of the same model",
    "spot_other": "spot of another model",
    "host": "host memory, pooled",
    "local": "weights in the region",
    "remote": "weights from another region",
}


def report(result: Result) -> str:
    """The page of a run."""
    strategy = f", scaled by {result.strategy}" if result.strategy else ""
    below = f"{span_text(result.simulated_s)} simulated, seed {result.seed}{strategy}"
    parts = [
        cards(_cards(result)),
        section(
            "Attainment",
            "Service: mean share of a request's time in which no token was overdue. Token: share of all tokens that "
            "were made by their deadline. The worst models first.",
            figures.attainment(result),
        ),
        section(
            "Instances against demand",
            "Above, interactive input tokens and the peak that the plan of the hour counts on; below, instances by "
            "state and what the plan wants. All endpoints, then the busiest.",
            figures.capacity(result),
        ),
        section(
            "Pools",
            "Above, GPUs by what holds them, those of pools among them; in the middle, endpoints that are served by a "
            "pool; below, how often their slots change the model.",
            figures.pools(result),
        ),
        section(
            "Utilization",
            "Effective memory utilization of each endpoint; grey: nothing serves there.",
            figures.utilization(result),
        ),
        section(
            "Time to the first token",
            "95th percentile of the requests that ended, by tier, and how many ended.",
            figures.first_tokens(result),
        ),
        section(
            "Deferred requests",
            "Those that wait in the control plane, and for how long the oldest has.",
            figures.queues(result),
        ),
        section(
            "Where instance-hours went",
            "Warming is what provisioning wastes: GPUs that are held and do not serve yet. Spot is lent out.",
            figures.hours(result),
        ),
        section(
            "GPU types",
            "GPU hours by state, and what they cost. Spot is lent out and costs nothing.",
            _gpu_types(result.totals),
        ),
        section("Requests", "By tier over all models, then by model.", _rows(result)),
        section("Totals", "Over the whole run.", _totals(result)),
    ]
    return page(f"Simulation: {result.scenario}", below, parts, f"Event log {result.event_log_hash}")


def span_text(seconds: float) -> str:
    """A time as people say it."""
    for unit_s, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.4g} {name}"
    return f"{seconds:,.4g} seconds"


def time_text(quantiles: Quantiles | None, name: str) -> str:
    """One of the quantiles."""
    return "-" if quantiles is None else f"{getattr(quantiles, name):.3g} s"


def wasted_share(totals: Totals) -> float | None:
    """The share of our GPU hours, without those lent out, in which instances warmed up."""
    held = held_hours(totals.gpu_hours)
    return totals.gpu_hours.get("warming", 0.0) / held if held else None


def _cards(result: Result) -> Iterable[tuple[str, str]]:
    totals, wasted = result.totals, wasted_share(result.totals)
    yield "requests", f"{result.requests:,}"
    yield "service attainment", f"{result.service_attainment:.2%}"
    yield "token attainment", f"{result.token_attainment:.2%}"
    yield "failed or refused", f"{sum(result.failures.values()):,}"
    yield "GPU hours", f"{held_hours(totals.gpu_hours):,.1f}"
    if totals.cost:
        yield "cost", f"${totals.cost:,.0f}" if totals.cost >= 100 else f"${totals.cost:,.2f}"
    yield "slots busy", f"{result.busy_share:.1%}"
    if wasted:
        yield "of GPU hours warming", f"{wasted:.1%}"
    if totals.gpu_hours.get("spot"):
        yield "GPU hours lent as spot", f"{totals.gpu_hours['spot']:,.1f}"
    if totals.gpu_hours.get("pooled"):
        yield "of GPU hours in pools", f"{totals.gpu_hours['pooled'] / held_hours(totals.gpu_hours):.1%}"
    if totals.switches:
        yield "model switches", f"{totals.switches:,}"
    if totals.node_failures:
        yield "node failures", f"{totals.node_failures:,}"


def _gpu_types(totals: Totals) -> str | None:
    """A row for each GPU type; None if there is only one."""
    if len(totals.gpu_types) < 2:
        return None
    states = [state for state in figures.STATE_COLOURS if totals.gpu_hours.get(state)]
    headers = [Cell(text="GPU type", word=True), *(Cell(text=f"{state}, h") for state in states)]
    headers += [Cell(text="cost"), Cell(text="of all cost")]
    rows = []
    for name, one in sorted(totals.gpu_types.items()):
        share = f"{one.cost / totals.cost:.1%}" if totals.cost else "-"
        words = [*(f"{one.gpu_hours.get(state, 0.0):,.2f}" for state in states), f"${one.cost:,.2f}", share]
        rows.append([Cell(text=name, word=True), *(Cell(text=word) for word in words)])
    return table(headers, rows)


def _rows(result: Result) -> str:
    headers = [Cell(text=name, word=True) for name in ("model", "tier")]
    headers += [
        Cell(text=name)
        for name in ("requests", "failed", "service", "token", "first token late", "TTFT p50", "p95", "p99")
    ]
    headers += [Cell(text=name) for name in ("TBT p95", "whole p95")]
    return table(headers, [_row(row) for row in (*result.tiers, *result.rows)])


def _row(row: Row) -> list[Cell]:
    words = [Cell(text=row.model or "all models", word=True), Cell(text=row.tier, word=True)]
    figures_of = [
        f"{row.requests:,}",
        f"{row.failed:,}",
        f"{row.service_attainment:.2%}",
        f"{row.token_attainment:.2%}",
        f"{row.ttft_violations:.2%}",
        *(time_text(row.ttft_s, name) for name in ("p50", "p95", "p99")),
        time_text(row.tbt_mean_s, "p95"),
        time_text(row.service_s, "p95"),
    ]
    return words + [Cell(text=text) for text in figures_of]


def _totals(result: Result) -> str:
    totals = result.totals
    lines = [(f"GPU hours, {state}", f"{hours:,.2f}") for state, hours in totals.gpu_hours.items() if hours]
    lines += [(f"instances from {START_NAMES[start]}", f"{count:,}") for start, count in totals.starts.items() if count]
    counts = {
        "instances asked for": totals.scale_outs,
        "instances let go": totals.scale_ins,
        "asked for without room (each try)": totals.unplaced,
        "model switches": totals.switches,
        "node failures": totals.node_failures,
        "requests interrupted by them": totals.interrupted,
    }
    lines += [(name, f"{count:,}") for name, count in counts.items() if count]
    lines += [(f"requests failed: {reason}", f"{count:,}") for reason, count in result.failures.items()]
    lines += [("requests in the system, mean", f"{result.requests_in_system_mean:,.2f}")]
    return table(
        [Cell(text="what", word=True), Cell(text="figure")],
        [[Cell(text=name, word=True), Cell(text=value)] for name, value in lines],
    )
