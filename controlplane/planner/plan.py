"""Plan an hour: read the fleet and its forecasts, solve the placement, write the plan."""

import time

import structlog

from controlplane.errors import StaleIndexError
from controlplane.planner.compare import differing
from controlplane.planner.correct import profiles_in_force
from controlplane.planner.draft import Draft, DraftOf, Problem, draft_of, failed_draft
from controlplane.planner.expected import expected_demand, past_errors
from controlplane.planner.snapshot import PLAN_SILENT_S, read_to_plan
from controlplane.policies.hour import HourSettings, choose_hour
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.placement.error_correlation import NO_ERRORS
from controlplane.policies.placement.facts import PlacementSettings
from controlplane.policies.placement.poolable import PoolableSettings
from controlplane.policies.placement.reserve_facts import ReserveSettings
from controlplane.policies.planned_layouts import PlannedLayoutSettings
from controlplane.settings import Settings
from controlplane.store.fleet import fleet_index
from controlplane.store.plans import (
    SCHEDULE,
    add_plan,
    apply_plan,
    fail_stale_drafts,
    is_planned,
    supersede_drafts,
)
from controlplane.store.session import Database

_HOUR_S = 3600
_ATTEMPTS_MAX = 3
log = structlog.get_logger()


def plan_hour(database: Database, settings: Settings, *, now_s: float) -> str | None:
    """Make the plan of the hour that begins nearest to now, so that a late task still plans its own hour, and apply it
    if it needs no approval. None if another worker made it already, or an operator applied a plan of that hour: the
    schedule does not replace it. Drafts of earlier hours are superseded.

    A failed attempt keeps the plan in force and stores a failed plan with the reason; the next task retries.
    """
    window_start_s = hour_nearest(now_s)
    with database.transaction() as session:
        for plan_id in supersede_drafts(session, before_s=window_start_s):
            log.warning("plan not applied in its hour", plan=plan_id)
        for plan_id in fail_stale_drafts(session, window_start_s=window_start_s):
            log.warning("plan went stale before it was approved; planning anew", plan=plan_id)
    of = DraftOf(window_start_s=window_start_s, origin=SCHEDULE, created_by=SCHEDULE)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        with database.transaction() as session:
            if is_planned(session, window_start_s):
                return None
            index = fleet_index(session)
        try:
            draft = draft_plan(database, settings, of, now_s=now_s)
        except Exception as error:  # the plan in force stays, and the failed plan has the reason
            log.exception("planning failed", window_start_s=window_start_s)
            reason = f"planning failed, the plan in force stays: {type(error).__name__}: {error}"
            draft = failed_draft(of, index=index, reason=reason)
        try:
            return write_draft(database, draft, now_s=now_s)
        except StaleIndexError as error:
            if attempt == _ATTEMPTS_MAX:
                reason = f"planning failed, the plan in force stays: {attempt} attempts went stale; {error}"
                return write_draft(database, failed_draft(of, index=index, reason=reason), now_s=now_s)
    return None


def hour_nearest(now_s: float) -> int:
    """The start of the hour whose start is nearest to `now_s`."""
    return (int(now_s) + _HOUR_S // 2) // _HOUR_S * _HOUR_S


def write_draft(database: Database, draft: Draft, *, now_s: float) -> str | None:
    """Write a draft and, where it needs no approval, apply it; both or neither.

    Raises:
        StaleIndexError: the fleet changed while the solver worked.
    """
    plan_id, index, reason = draft.plan.id, draft.plan.fleet_index, draft.plan.approval_reason
    failed = draft.plan.state == PlanState.FAILED
    words = draft.plan.reason
    with database.transaction() as session:
        if is_planned(session, draft.plan.window_start_s) or not add_plan(session, draft.plan, draft.entries):
            return None
        if not failed and reason is None:
            apply_plan(session, plan_id, index=index, now_s=now_s)
    if failed:
        log.error("no plan, the one in force stays", plan=plan_id, reason=words)
    elif reason is not None:
        log.warning("plan waits for an operator", plan=plan_id, reason=reason)
    return plan_id


def draft_plan(
    database: Database,
    settings: Settings,
    of: DraftOf,
    *,
    now_s: float,
    origin_s: int | None = None,
    keep_forecasts: bool = True,
) -> Draft:
    """Read and decide; nothing is written except, with `keep_forecasts`, missing forecasts. `origin_s`: use the
    forecasts of that moment, by default the newest. No transaction is open while a forecaster or the solver runs.
    """
    expected = expected_demand(database, settings, now_s=now_s, origin_s=origin_s, keep=keep_forecasts)
    with database.one_moment() as session:
        index = fleet_index(session)
        fleet = read_to_plan(session, settings, now_s=now_s, window_start_s=of.window_start_s)
        profiles, latencies = profiles_in_force(session, settings), differing(session)
        errors = past_errors(session, until_s=expected.origin_s) if settings.plan_reserve else NO_ERRORS
    chosen = hour_settings(settings)
    began_s = time.monotonic()
    stop_s = began_s + settings.placement_time_limit_s
    hour = choose_hour(
        fleet,
        expected.demand,
        expected.medians,
        now_s,
        chosen,
        errors=errors,
        should_stop=lambda: time.monotonic() > stop_s,
    )
    solve_time_s = time.monotonic() - began_s
    problem = Problem(
        index=index,
        hour=hour,
        settings=chosen.placement,
        expected=expected,
        profiles=profiles,
        latencies=latencies,
    )
    return draft_of(problem, of, now_s=now_s, solve_time_s=solve_time_s, settings=settings)


def hour_settings(settings: Settings) -> HourSettings:
    """How hours are planned, as the service is set."""
    return HourSettings(
        placement=PlacementSettings(
            epsilon=settings.placement_epsilon,
            time_limit_s=settings.placement_time_limit_s,
            gap=settings.placement_gap,
        ),
        pools=poolable_settings(settings),
        reserve=ReserveSettings(
            enabled=settings.plan_reserve,
            quantile=settings.plan_reserve_quantile,
            upper_quantile=settings.forecast_quantile,
            correlation=settings.plan_reserve_correlation,
            fill=settings.pool_fill,
            epsilon=settings.placement_epsilon,
        ),
        layouts=PlannedLayoutSettings(enabled=settings.plan_layouts, hold_s=settings.plan_layout_hold_s),
        stale_s=PLAN_SILENT_S,
    )


def poolable_settings(settings: Settings) -> PoolableSettings:
    """How pools are planned, as the service is set."""
    return PoolableSettings(
        enabled=settings.pools_enabled,
        fill=settings.pool_fill,
        prompt_tokens=settings.pool_prompt_tokens,
        output_tokens=settings.pool_output_tokens,
        tbt_s=settings.pool_tbt_s,
        round_s=settings.pool_round_s,
    )
