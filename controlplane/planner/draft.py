"""The rows of a plan from the solver's answer: its inputs, its changes, and whether an operator must approve it."""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.planner import compare
from controlplane.planner.correct import ProfilesInForce
from controlplane.planner.expected import Expected
from controlplane.policies.facts import PoolKey
from controlplane.policies.hour import HourPlan
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.placement.decision import Placement, PlacementStatus
from controlplane.policies.placement.document import to_document
from controlplane.policies.placement.facts import PlacementSettings
from controlplane.policies.placement.reserve_facts import Reserve
from controlplane.policies.plan_approval import (
    ApprovalFacts,
    ApprovalRule,
    ApprovalSettings,
    GpuChange,
    choose_approval,
)
from controlplane.settings import Settings
from controlplane.store.latency_comparisons import LatencyComparisonRow
from controlplane.store.plans import Plan, PlanEntry, new_plan_id


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan not yet written."""

    plan: Plan
    entries: list[PlanEntry]


@dataclass(frozen=True, kw_only=True)
class DraftOf:
    """The hour of a draft, and who asked for it."""

    window_start_s: int
    origin: str
    created_by: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The inputs of a plan, and what was planned. `index`: the fleet's index when the facts were read; `latencies`:
    comparisons whose times are not as the profiles say.
    """

    index: int
    hour: HourPlan
    settings: PlacementSettings
    expected: Expected
    profiles: ProfilesInForce
    latencies: Sequence[LatencyComparisonRow]


def draft_of(problem: Problem, of: DraftOf, *, now_s: float, solve_time_s: float, settings: Settings) -> Draft:
    """The rows of a plan: a draft, or a failed attempt if no solver answered."""
    hour, placement = problem.hour, problem.hour.placement
    failed = placement.status == PlacementStatus.FAILED
    plan = Plan(
        id=new_plan_id(),
        state=PlanState.FAILED if failed else PlanState.DRAFT,
        origin=of.origin,
        window_start_s=of.window_start_s,
        fleet_index=problem.index,
        solver=placement.solver,
        status=placement.status,
        objective_per_hour=placement.objective_per_hour,
        bound_per_hour=placement.bound_per_hour,
        gap=placement.gap,
        solve_time_s=solve_time_s,
        unserved=_shortfalls(placement),
        pools=pools_record(hour),
        layouts=layouts_record(hour),
        reason=placement.reason
        if failed
        else _reason(
            placement.reason,
            hour.pools.summary(),
            problem.profiles.summary(),
            compare.summary(problem.latencies),
            hour.layouts.summary(),
        ),
        inputs={
            "problem": to_document(hour.facts, problem.settings),
            "forecasts": problem.expected.record(),
            "pools": hour.pools.record() | {"reserve": _reserve_settings(settings)},
            "corrections": problem.profiles.record(),
            "latencies": compare.record(problem.latencies),
            "layouts": _layout_inputs(hour, settings),
        },
        approval_reason=None if failed else _approval_reason(hour, now_s, settings),
        created_by=of.created_by,
    )
    entries = [
        PlanEntry(
            plan_id=plan.id,
            model=entry.endpoint.model,
            region=entry.endpoint.region,
            gpu_type=entry.gpu_type,
            before=entry.before,
            after=entry.after,
            reason=entry.reason,
            constraint=entry.constraint,
            cost_if_not=entry.cost_if_not,
        )
        for entry in placement.entries
    ]
    return Draft(plan=plan, entries=entries)


def _reason(*words: str) -> str:
    return "; ".join(each for each in words if each)


def failed_draft(of: DraftOf, *, index: int, reason: str) -> Draft:
    """The record of an attempt without a plan."""
    plan = Plan(
        id=new_plan_id(),
        state=PlanState.FAILED,
        origin=of.origin,
        window_start_s=of.window_start_s,
        fleet_index=index,
        solver="none",
        status=PlacementStatus.FAILED,
        solve_time_s=0.0,
        unserved=[],
        pools=[],
        reason=reason,
        created_by=of.created_by,
    )
    return Draft(plan=plan, entries=[])


def _approval_reason(hour: HourPlan, now_s: float, settings: Settings) -> str | None:
    """Why an operator must approve the plan; None: it needs no approval."""
    changes, prices = _changes(hour), hour.facts.gpu_cost_per_hour
    approval = choose_approval(
        ApprovalFacts(
            changes=changes,
            fleet_gpus=sum(hour.facts.capacity.values()),
            cost_before_per_hour=sum(change.before * prices[change.place.gpu_type] for change in changes),
            cost_after_per_hour=hour.placement.gpu_cost_per_hour,
        ),
        now_s,
        ApprovalSettings(
            rule=ApprovalRule(settings.plan_approval),
            gpus_moved_max=settings.plan_gpus_moved_max,
            share_moved_max=settings.plan_share_moved_max,
            cost_change_max=settings.plan_cost_change_max,
        ),
    )
    return None if approval.automatic else "; ".join(approval.reasons)


def _changes(hour: HourPlan) -> tuple[GpuChange, ...]:
    """Every cell, and every pool with its reserve, in GPUs."""
    cells = []
    for entry in hour.placement.entries:
        gpus = hour.facts.profiles[entry.key.pair].gpus
        cells.append(GpuChange(place=entry.key.place, before=entry.before * gpus, after=entry.after * gpus))
    pools = (GpuChange(place=pool.place, before=pool.before, after=pool.after) for pool in hour.pool_sizes)
    return (*cells, *pools)


def _shortfalls(placement: Placement) -> list[dict[str, object]]:
    """Demand that the plan cannot serve, and minimums that it cannot hold."""
    unserved: list[dict[str, object]] = [
        {"model": u.model, "region": u.region, "tokens_per_s": u.tokens_per_s, "reason": u.reason}
        for u in placement.unserved
    ]
    return unserved + [
        {
            "model": b.endpoint.model,
            "region": b.endpoint.region,
            "tokens_per_s": 0.0,
            "reason": f"{b.placed} of {b.minimum} instances; {b.reason}",
        }
        for b in placement.below_minimum
    ]


def _reserve_settings(settings: Settings) -> dict[str, float] | None:
    """How reserves were planned; None: none was."""
    if not settings.plan_reserve:
        return None
    return {"quantile": settings.plan_reserve_quantile, "correlation": settings.plan_reserve_correlation}


def pools_record(hour: HourPlan) -> list[dict[str, object]]:
    """Every pool with its size before and after, the endpoints that it serves, and the reserve that is a part of it."""
    return [
        {
            "region": pool.region,
            "gpu_type": pool.gpu_type,
            "worker_gpus": pool.worker_gpus,
            "before": pool.before,
            "after": pool.after,
            "pooled": [
                {"model": p.endpoint.model, "occupancy": p.occupancy, "before": p.before, "reason": p.reason}
                for p in hour.placement.pooled
                if p.pool == pool.key
            ],
        }
        | _reserve_record(hour.reserve, pool.key)
        for pool in hour.pool_sizes
    ]


def layouts_record(hour: HourPlan) -> list[dict[str, object]]:
    """Every node that is regrouped, with the sizes of its slots before and after."""
    return [
        {
            "node": one.node,
            "region": one.place.region,
            "gpu_type": one.place.gpu_type,
            "before": list(one.before),
            "after": list(one.after),
            "reason": one.reason,
        }
        for one in hour.layouts.decision.regroupings
    ]


def _layout_inputs(hour: HourPlan, settings: Settings) -> dict[str, object] | None:
    """What layouts were chosen by: GPUs by the size of slots that they have to be in, and slots that are missing. None:
    plans write no layouts.
    """
    if not settings.plan_layouts:
        return None
    missing = hour.layouts.decision.missing
    places = [
        {
            "region": place.region,
            "gpu_type": place.gpu_type,
            "slots_of": [
                {"gpus": size, "taken_gpus": gpus, "missing_slots": missing.get(place, {}).get(size, 0)}
                for size, gpus in sizes.items()
            ],
        }
        for place, sizes in sorted(hour.layouts.demand.items(), key=lambda item: item[0])
    ]
    return {"hold_s": settings.plan_layout_hold_s, "places": places}


def _reserve_record(reserve: Reserve, pool: PoolKey) -> dict[str, object]:
    """The reserve that is a part of a pool, with the endpoints that it holds; nothing where there is none."""
    held = [
        {"model": one.key.model, "instances": one.instances, "reason": one.reason}
        for one in reserve.endpoints
        if one.pool == pool
    ]
    if not held:
        return {}
    size = next((size for size in reserve.sizes if size.pool == pool), None)
    found = {
        "gpus": 0 if size is None else size.gpus,
        "missing_gpus": 0 if size is None else size.missing_gpus,
        "reason": "own instances suffice" if size is None else size.reason,
    }
    left_out = {at.model: reason for at, reason in sorted(reserve.left_out.items()) if at.region == pool.region}
    return {"reserve": found | {"held": held, "left_out": left_out}}
