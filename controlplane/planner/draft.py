"""The rows of a plan from the solver's answer: its inputs, its changes, and whether an operator must approve it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.planner.correct import ProfilesInForce
from controlplane.planner.expected import Expected
from controlplane.policies.facts import ModelGpu, RegionGpu
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.placement.decision import Placement, PlacementStatus
from controlplane.policies.placement.document import to_document
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.poolable import PlannedPools
from controlplane.policies.plan_approval import (
    ApprovalFacts,
    ApprovalRule,
    ApprovalSettings,
    GpuChange,
    choose_approval,
)
from controlplane.settings import Settings
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
    """The inputs of a placement. `index`: the fleet's index when the facts were read."""

    index: int
    facts: PlacementFacts
    pools: PlannedPools
    settings: PlacementSettings
    expected: Expected
    profiles: ProfilesInForce


def draft_of(
    placement: Placement, problem: Problem, of: DraftOf, *, now_s: float, solve_time_s: float, settings: Settings
) -> Draft:
    """The rows of a plan: a draft, or a failed attempt if no solver answered."""
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
        pools=_pools(placement),
        reason=placement.reason
        if failed
        else _reason(placement.reason, problem.pools.summary(), problem.profiles.summary()),
        inputs={
            "problem": to_document(problem.facts, problem.settings),
            "forecasts": problem.expected.record(),
            "pools": problem.pools.record(),
            "corrections": problem.profiles.record(),
        },
        approval_reason=None if failed else _approval_reason(placement, problem.facts, now_s, settings),
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


def _approval_reason(placement: Placement, facts: PlacementFacts, now_s: float, settings: Settings) -> str | None:
    """Why an operator must approve the plan; None: it needs no approval."""
    approval = choose_approval(
        ApprovalFacts(
            changes=_changes(placement, facts.profiles),
            fleet_gpus=sum(facts.capacity.values()),
            cost_before_per_hour=_cost_before(placement, facts),
            cost_after_per_hour=placement.gpu_cost_per_hour,
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


def _changes(placement: Placement, profiles: Mapping[ModelGpu, Any]) -> tuple[GpuChange, ...]:
    """Every cell and every pool, in GPUs."""
    cells = []
    for entry in placement.entries:
        gpus = profiles[ModelGpu(model=entry.endpoint.model, gpu_type=entry.gpu_type)].gpus
        place = RegionGpu(region=entry.endpoint.region, gpu_type=entry.gpu_type)
        cells.append(GpuChange(place=place, before=entry.before * gpus, after=entry.after * gpus))
    pools = [
        GpuChange(place=RegionGpu(region=p.region, gpu_type=p.gpu_type), before=p.before, after=p.after)
        for p in placement.pools
    ]
    return (*cells, *pools)


def _cost_before(placement: Placement, facts: PlacementFacts) -> float:
    changes = _changes(placement, facts.profiles)
    return sum(change.before * facts.gpu_cost_per_hour[change.place.gpu_type] for change in changes)


def _shortfalls(placement: Placement) -> list[dict[str, object]]:
    """Demand that the plan cannot serve, and minimums that it cannot hold."""
    unserved: list[dict[str, object]] = [
        {"model": u.model, "region": u.region, "tokens_per_s": u.tokens_per_s, "reason": u.reason}
        for u in placement.unserved
    ]
    return unserved + [
        {"model": b.endpoint.model, "region": b.endpoint.region, "tokens_per_s": 0.0, "reason": b.reason}
        for b in placement.below_minimum
    ]


def _pools(placement: Placement) -> list[dict[str, object]]:
    """Every pool with its size before and after and the endpoints it serves."""
    return [
        {
            "region": pool.region,
            "gpu_type": pool.gpu_type,
            "before": pool.before,
            "after": pool.after,
            "pooled": [
                {"model": p.endpoint.model, "occupancy": p.occupancy, "before": p.before, "reason": p.reason}
                for p in placement.pooled
                if (p.endpoint.region, p.gpu_type) == (pool.region, pool.gpu_type)
            ],
        }
        for pool in placement.pools
    ]
