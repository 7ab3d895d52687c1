"""Forgetting old plans and forecasts. What is in force, what waits, and what a rollback would restore stays."""

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import PlanState
from controlplane.store.demand_tables import Forecast
from controlplane.store.plan_tables import Plan

_ENDED = (PlanState.SUPERSEDED, PlanState.FAILED, PlanState.ROLLED_BACK, PlanState.REJECTED)


def forget_plans(session: Session, *, keep_s: int) -> int:
    """Delete plans that ended and were made more than `keep_s` seconds ago; returns how many. The plan before the one
    in force stays, whatever its age.
    """
    in_force = Plan.state.in_((PlanState.APPLYING, PlanState.APPLIED))
    restorable = select(Plan.previous_plan_id).where(in_force, Plan.previous_plan_id.is_not(None))
    made_before = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, keep_s)
    old = list(
        session.scalars(
            select(Plan.id).where(
                Plan.state.in_(_ENDED), Plan.created_at < made_before, Plan.id.not_in(restorable.scalar_subquery())
            )
        )
    )
    session.execute(update(Plan).where(Plan.previous_plan_id.in_(old)).values(previous_plan_id=None))
    session.execute(delete(Plan).where(Plan.id.in_(old)))
    return len(old)


def forget_forecasts(session: Session, *, before_s: int) -> None:
    """Delete forecasts with an origin before the Unix time `before_s`."""
    session.execute(delete(Forecast).where(Forecast.origin_s < before_s))
