"""Deleting old rows, a bounded number at a time: a transaction that deletes them is short, however many there are.

Of plans, what is in force, what waits, and what a rollback would restore stays.
"""

from typing import Any

from sqlalchemy import ColumnElement, any_, delete, func, literal_column, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from controlplane.policies.lifecycle import PlanState
from controlplane.store.demand_tables import DemandBucket, DemandMinute, DemandSpan, Forecast
from controlplane.store.plan_tables import Plan
from controlplane.store.tables import Base

_ENDED = (PlanState.SUPERSEDED, PlanState.FAILED, PlanState.ROLLED_BACK, PlanState.REJECTED)


def delete_some(
    session: Session, table: type[Base], *old: ColumnElement[bool], order: InstrumentedAttribute[Any], count_max: int
) -> int:
    """Delete at most `count_max` rows of those that are `old`, the first by `order`; returns how many. Rows that
    somebody else has locked wait for the next time.
    """
    place: ColumnElement[str] = literal_column(f"{table.__tablename__}.ctid")
    rows = select(place).select_from(table).where(*old).order_by(order)
    some = rows.limit(count_max).with_for_update(skip_locked=True).scalar_subquery()
    # as an array: Postgres goes to these rows one by one, and never compares the whole table with them
    deleted = delete(table).where(place == any_(func.array(some))).returning(place)
    return len(session.execute(deleted, execution_options={"synchronize_session": False}).all())


def forget_plans(session: Session, *, keep_s: int, count_max: int) -> int:
    """Delete at most `count_max` plans that ended and were made more than `keep_s` seconds ago; returns how many. The
    plan before the one in force stays, whatever its age.
    """
    in_force = Plan.state.in_((PlanState.APPLYING, PlanState.APPLIED))
    restorable = select(Plan.previous_plan_id).where(in_force, Plan.previous_plan_id.is_not(None))
    made_before = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, keep_s)
    old = list(
        session.scalars(
            select(Plan.id)
            .where(Plan.state.in_(_ENDED), Plan.created_at < made_before, Plan.id.not_in(restorable.scalar_subquery()))
            .order_by(Plan.created_at)
            .limit(count_max)
        )
    )
    session.execute(update(Plan).where(Plan.previous_plan_id.in_(old)).values(previous_plan_id=None))
    session.execute(delete(Plan).where(Plan.id.in_(old)))
    return len(old)


def forget_forecasts(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` forecasts with an origin before the Unix time `before_s`; returns how many."""
    return delete_some(session, Forecast, Forecast.origin_s < before_s, order=Forecast.origin_s, count_max=count_max)


def forget_demand(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` minutes of demand from before the Unix time `before_s`; returns how many. A trace that
    was imported may be older: it stays until its import is as long ago.
    """
    imported_at = DemandBucket.imported_at
    old = (DemandBucket.start_s < before_s, or_(imported_at.is_(None), imported_at < func.to_timestamp(before_s)))
    return delete_some(session, DemandBucket, *old, order=DemandBucket.start_s, count_max=count_max)


def forget_measured_minutes(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` records of measured minutes before the Unix time `before_s`, and as many of endpoints
    that were measured until then; returns the larger count.
    """
    spans = DemandSpan.until_s < before_s
    minutes = DemandMinute.start_s < before_s
    return max(
        delete_some(session, DemandSpan, spans, order=DemandSpan.until_s, count_max=count_max),
        delete_some(session, DemandMinute, minutes, order=DemandMinute.start_s, count_max=count_max),
    )
