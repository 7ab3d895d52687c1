"""The explanation of a plan: what was expected, what changes and why, which constraints bind, and how certain it is."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

CHANGES_MAX = 40
"""Changes listed one by one; of more, those that matter most."""
SERIES_MAX = 5

_BINDS = {
    "home": "demand that must be served at home",
    "global": "demand of the whole fleet",
    "minimum": "a minimum",
    "maximum": "a maximum",
    "pin": "a pin",
    "capacity": "the GPUs there are",
    "cost": "nothing but cost",
    "none": "nothing; they stand within the solver's gap",
}


@dataclass(frozen=True, kw_only=True)
class SeriesSummary:
    """What one endpoint was expected to reach, tokens per second. `fallback`: why that is no forecast in time."""

    name: str
    forecaster: str
    peak_q50: float
    peak_upper: float
    fallback: str | None


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """Forecast peaks against actual ones: how many hours, how many stayed at or under the upper quantile, and the sums
    of |median - actual| and of actual peaks in tokens per second.
    """

    hours: int
    covered: int
    error_sum: float
    actual_sum: float


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """Instances of an endpoint on a GPU type."""

    name: str
    before: int
    after: int
    reason: str
    constraint: str
    cost_if_not: float


@dataclass(frozen=True, kw_only=True)
class PoolSummary:
    """GPUs of a pool, and the endpoints that it serves, and those of them that are `new` in it. `occupied`: GPUs that
    they take together at their peaks. `reserve`: of its GPUs, those of the reserve of other endpoints, with its reason.
    """

    name: str
    before: int
    after: int
    endpoints: tuple[str, ...]
    new: tuple[str, ...] = ()
    occupied: float = 0.0
    reserve: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """All that an explanation contains. Times are Unix times; None: not known. `shortfalls`: what is not served,
    `corrections`: profiles that count otherwise than stated, `latencies`: endpoints that were slower or faster than
    their profiles say, `layouts`: nodes that are regrouped, as text.
    """

    plan_id: str
    state: str
    window_start_s: int
    made_by: str
    index: int
    approved_by: str | None
    approval_reason: str | None
    previous_plan_id: str | None
    reason: str
    solver: str
    status: str
    solve_time_s: float
    objective_per_hour: float | None
    bound_per_hour: float | None
    gap: float | None
    origin_s: int | None
    quantile: float | None
    series: tuple[SeriesSummary, ...]
    cells: tuple[CellSummary, ...]
    pools: tuple[PoolSummary, ...]
    shortfalls: tuple[str, ...]
    day_before: ForecastRecord | None
    outcome: ForecastRecord | None
    corrections: tuple[str, ...] = ()
    latencies: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()


def pool_name(pool: Mapping[str, Any], pools: Iterable[Mapping[str, Any]]) -> str:
    """A pool's name, as a plan's document has it: its place, and the GPUs of each worker of its slots where the place
    has `pools` of several sizes. A plan of an older release, and what restores it, does not say these.
    """
    place = pool["region"], pool["gpu_type"]
    sizes = {each.get("worker_gpus") for each in pools if (each["region"], each["gpu_type"]) == place}
    size = f", slots of {pool['worker_gpus']}" if len(sizes) > 1 and "worker_gpus" in pool else ""
    return f"{pool['gpu_type']} in {pool['region']}{size}"


def explain_plan(plan: PlanSummary) -> str:
    """The explanation as text: a few short paragraphs with headings."""
    paragraphs = (
        ("", _head(plan)),
        ("What was expected", _expected(plan)),
        ("Profiles, corrected by what instances do", _listed(plan.corrections)),
        ("Latency that is not what profiles say", _listed(plan.latencies)),
        ("What changes, and why", _changes(plan.cells)),
        ("What binds", _binds(plan.cells)),
        ("Pools", _pools(plan.pools)),
        ("Nodes whose GPUs are grouped into other slots", _listed(plan.layouts)),
        ("What is not served", _shortfalls(plan)),
        ("How sure this is", _certainty(plan)),
    )
    sections = []
    for heading, lines in paragraphs:
        body = [f"  {line}" if heading else line for line in lines]
        if body:
            sections.append("\n".join([heading, *body] if heading else body))
    return "\n\n".join(sections)


def _head(plan: PlanSummary) -> Iterator[str]:
    hours = f"{_clock(plan.window_start_s)} to {_clock(plan.window_start_s + 3600)} UTC on {_day(plan.window_start_s)}"
    yield f"Plan {plan.plan_id} for {hours}: {plan.state.replace('_', ' ')}."
    yield f"Made by {plan.made_by} at fleet index {plan.index}. {_sentence(plan.reason)}".rstrip()
    if plan.approval_reason and plan.approved_by is None and plan.state == "draft":
        yield f"It waits for an operator: {_sentence(plan.approval_reason)}"
    elif plan.approval_reason:
        yield f"It needed an operator: {_sentence(plan.approval_reason)}"
    if plan.approved_by == "automatic":
        yield "It went into force by itself; no limit of the approval policy was exceeded."
    elif plan.approved_by is not None:
        yield f"Approved by {plan.approved_by}."
    if plan.previous_plan_id is not None:
        yield f"Before it, plan {plan.previous_plan_id} was in force."


def _expected(plan: PlanSummary) -> Iterator[str]:
    if plan.origin_s is None:
        yield "No forecast was asked: no solver made this plan."
        return
    if not plan.series:
        yield f"Nothing: no endpoint had interactive demand in the history before {_clock(plan.origin_s)} UTC."
        return
    upper, median = sum(s.peak_upper for s in plan.series), sum(s.peak_q50 for s in plan.series)
    yield (
        f"{_count(len(plan.series), 'endpoint')} from {_clock(plan.origin_s)} UTC: peaks of the coming hour add up to"
        f" {upper:,.0f} tokens/s at the {plan.quantile:g} quantile, {median:,.0f} at the median."
    )
    largest = sorted(plan.series, key=lambda s: (-s.peak_upper, s.name))[:SERIES_MAX]
    yield "The largest: " + ", ".join(f"{s.name} {s.peak_upper:,.0f} ({s.forecaster})" for s in largest) + "."
    chosen = Counter(s.forecaster for s in plan.series if s.fallback is None)
    if chosen:
        yield "Forecast by " + ", ".join(f"{name} for {count}" for name, count in chosen.most_common()) + "."
    missing = [s for s in plan.series if s.fallback is not None]
    if missing:
        yield f"{_count(len(missing), 'endpoint')} had no forecast in time:"
        yield from (f"- {s.name}: {s.fallback}" for s in missing[:SERIES_MAX])
        if len(missing) > SERIES_MAX:
            yield f"- and {len(missing) - SERIES_MAX} more"


def _listed(texts: Sequence[str]) -> Iterator[str]:
    yield from (f"- {text}" for text in texts[:CHANGES_MAX])
    if len(texts) > CHANGES_MAX:
        yield f"- and {len(texts) - CHANGES_MAX} more"


def _changes(cells: Sequence[CellSummary]) -> Iterator[str]:
    changed = [cell for cell in cells if cell.before != cell.after]
    if not changed:
        yield "Nothing: every count stays as it is." if cells else "Nothing: no instance is placed or planned."
        return
    starts = sum(max(0, cell.after - cell.before) for cell in changed)
    stops = sum(max(0, cell.before - cell.after) for cell in changed)
    yield f"{_count(starts, 'instance')} more, {stops} fewer; {_count(len(cells) - len(changed), 'count')} as before."
    changed.sort(key=lambda cell: (-cell.cost_if_not, -abs(cell.after - cell.before), cell.name))
    for cell in changed[:CHANGES_MAX]:
        price = ""
        if cell.cost_if_not > 0:
            price = f" Left as it was, the objective rises by {cell.cost_if_not:,.2f} an hour."
        yield f"- {cell.name}: {cell.before} -> {cell.after}. {_sentence(cell.reason)}{price}"
    if len(changed) > CHANGES_MAX:
        yield f"- and {len(changed) - CHANGES_MAX} changes that cost less not to make"


def _binds(cells: Sequence[CellSummary]) -> Iterator[str]:
    held = Counter(cell.constraint for cell in cells if cell.after or cell.before != cell.after)
    for constraint, count in held.most_common():
        yield f"{_count(count, 'count')}: {_BINDS.get(constraint, constraint)}"


def _pools(pools: Sequence[PoolSummary]) -> Iterator[str]:
    for pool in pools:
        size = f"{pool.after} GPUs" if pool.after == pool.before else f"{pool.before} -> {pool.after} GPUs"
        names = ", ".join(pool.endpoints[:SERIES_MAX]) + (", ..." if len(pool.endpoints) > SERIES_MAX else "")
        line = f"- {pool.name}: {size} for {_count(len(pool.endpoints), 'endpoint')}{f' ({names})' if names else ''}"
        if pool.after and pool.endpoints:
            line += f", which take turns on them and fill {pool.occupied / pool.after:.0%}"
        if pool.new:
            more = ", ..." if len(pool.new) > SERIES_MAX else ""
            line += f"; {len(pool.new)} new: {', '.join(pool.new[:SERIES_MAX])}{more}"
        if pool.reserve is not None:
            line += f"; {pool.reserve}"
        yield line


def _shortfalls(plan: PlanSummary) -> Iterator[str]:
    if plan.status == "failed":
        yield "Not known: there is no new placement, the present one stays."
    elif plan.origin_s is None:
        yield "Not known: the counts are those of an earlier plan."
    elif not plan.shortfalls:
        yield "Nothing: the plan covers all that was expected."
    yield from (f"- {text}" for text in plan.shortfalls)


def _certainty(plan: PlanSummary) -> Iterator[str]:
    if plan.origin_s is None:
        yield "No solver was asked."
        return
    solved = f"{plan.solver} ({plan.status.replace('_', ' ')}, {plan.solve_time_s:.2f} s)"
    if plan.objective_per_hour is not None and plan.bound_per_hour is not None and plan.gap is not None:
        room = max(0.0, plan.objective_per_hour - plan.bound_per_hour)
        yield (
            f"{solved}: objective {plan.objective_per_hour:,.2f} an hour; no plan is better by more than"
            f" {room:,.2f}, a gap of {plan.gap:.3%}."
        )
    else:
        yield f"{solved}: no bound is known, so a better plan may exist."
    yield _record("In the day before", plan.day_before, plan.quantile)
    if plan.outcome is not None and plan.outcome.hours:
        yield _record("In this very hour", plan.outcome, plan.quantile)


def _record(when: str, record: ForecastRecord | None, quantile: float | None) -> str:
    if record is None or not record.hours:
        return f"{when} no forecast can be held against what came."
    error = f"{record.error_sum / record.actual_sum:.1%}" if record.actual_sum else "undefined, all was zero,"
    return (
        f"{when}, {record.covered} of {record.hours} peaks of the largest endpoints"
        f" ({record.covered / record.hours:.0%}) stayed under their upper forecast, which aims at {quantile or 0:.0%};"
        f" the weighted error of the median was {error}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".;")
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _clock(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%H:%M")


def _day(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d")
