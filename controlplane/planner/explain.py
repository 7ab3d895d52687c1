"""Read the explanation of a plan: its stored inputs and answers, and how accurate its forecasts were."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.policies.plan_explanations import (
    CellSummary,
    ForecastRecord,
    PlanSummary,
    PoolSummary,
    SeriesSummary,
    explain_plan,
    pool_name,
)
from controlplane.store.demand import read_record
from controlplane.store.plans import Plan, entries_of, get_plan, inputs_of

_DAY_S = 86_400
_ENDPOINTS_MAX = 50
"""Endpoints whose past forecasts are read, the largest: more would be slow and add nothing."""


def explanation_of(session: Session, plan_id: str) -> str:
    """The explanation of a plan for operators.

    Raises:
        NotFoundError: no such plan.
    """
    plan = get_plan(session, plan_id)
    inputs = inputs_of(session, plan_id) or {}
    forecasts = inputs.get("forecasts")
    cells = tuple(
        CellSummary(
            name=f"{entry.model} in {entry.region} on {entry.gpu_type}",
            before=entry.before,
            after=entry.after,
            reason=entry.reason,
            constraint=entry.constraint,
            cost_if_not=entry.cost_if_not,
        )
        for entry in entries_of(session, plan_id)
    )
    day_before, outcome = _records(session, forecasts)
    return explain_plan(
        PlanSummary(
            plan_id=plan.id,
            state=plan.state,
            window_start_s=plan.window_start_s,
            made_by=plan.created_by if plan.created_by != plan.origin else f"the {plan.origin}",
            index=plan.fleet_index,
            approved_by=plan.approved_by,
            approval_reason=plan.approval_reason,
            previous_plan_id=plan.previous_plan_id,
            reason=plan.reason,
            solver=plan.solver,
            status=plan.status,
            solve_time_s=plan.solve_time_s,
            objective_per_hour=plan.objective_per_hour,
            bound_per_hour=plan.bound_per_hour,
            gap=plan.gap,
            origin_s=None if forecasts is None else forecasts["origin_s"],
            quantile=None if forecasts is None else forecasts["quantile"],
            series=() if forecasts is None else tuple(_series(each) for each in forecasts["series"]),
            corrections=tuple(_correction(each) for each in inputs.get("corrections", ())),
            latencies=tuple(_latency(each) for each in inputs.get("latencies", ())),
            cells=cells,
            pools=_pools(plan),
            layouts=tuple(_layout(each) for each in plan.layouts),
            shortfalls=tuple(_shortfall(each) for each in plan.unserved),
            day_before=day_before,
            outcome=outcome,
        )
    )


def _records(
    session: Session, forecasts: Mapping[str, Any] | None
) -> tuple[ForecastRecord | None, ForecastRecord | None]:
    """The accuracy of the forecasts of the day before the plan's origin, and of the plan's own."""
    if forecasts is None:
        return None, None
    origin_s, endpoints = forecasts["origin_s"], _largest(forecasts["series"])
    before = read_record(session, endpoints, since_s=origin_s - _DAY_S, until_s=origin_s - 1)
    return before, read_record(session, endpoints, since_s=origin_s, until_s=origin_s)


def _largest(series: Sequence[Mapping[str, Any]]) -> list[Endpoint]:
    largest = sorted(series, key=lambda each: -each["peak_upper"])[:_ENDPOINTS_MAX]
    return [Endpoint(model=each["model"], region=each["region"]) for each in largest]


def _series(each: Mapping[str, Any]) -> SeriesSummary:
    return SeriesSummary(
        name=f"{each['model']} in {each['region']}",
        forecaster=each["forecaster"],
        peak_q50=each["peak_q50"],
        peak_upper=each["peak_upper"],
        fallback=each["stand_in"],
    )


def _correction(each: Mapping[str, Any]) -> str:
    rate = f"{each['tokens_per_s']:,.0f} instead of {each['stated_tokens_per_s']:,.0f} tokens/s"
    return f"{each['model']} on {each['gpu_type']}: {rate}; {each['reason']}; {each['steps_reason']}"


def _latency(each: Mapping[str, Any]) -> str:
    return f"{each['model']} in {each['region']} on {each['gpu_type']}: {each['reason']}"


def _pools(plan: Plan) -> tuple[PoolSummary, ...]:
    return tuple(
        PoolSummary(
            name=pool_name(pool, plan.pools),
            before=pool["before"],
            after=pool["after"],
            endpoints=tuple(each["model"] for each in pool["pooled"]),
            new=tuple(each["model"] for each in pool["pooled"] if not each["before"]),
            occupied=sum(each["occupancy"] for each in pool["pooled"]),
            reserve=_reserve(pool.get("reserve")),
        )
        for pool in plan.pools
    )


def _layout(each: Mapping[str, Any]) -> str:
    before, after = (",".join(map(str, each[when])) for when in ("before", "after"))
    return f"{each['node']} ({each['gpu_type']} in {each['region']}): {before} -> {after}; {each['reason']}"


def _reserve(reserve: Mapping[str, Any] | None) -> str | None:
    """The reserve of a region in words."""
    if reserve is None:
        return None
    left_out = "".join(f"; {model} is left out: {reason}" for model, reason in reserve["left_out"].items())
    return f"reserve of {reserve['gpus']} GPUs for {len(reserve['held'])} endpoints: {reserve['reason']}{left_out}"


def _shortfall(each: Mapping[str, Any]) -> str:
    where = each["region"] or "all regions"
    what = f"{each['tokens_per_s']:,.0f} tokens/s" if each["tokens_per_s"] else "too few instances"
    return f"{each['model']} in {where}: {what}; {each['reason']}"
