"""Plans: written once, applied once, rolled back by a new plan. Which plan is in force is checked and changed under the
fleet's lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import uuid_utils
from sqlalchemy import CheckConstraint, ForeignKey, Index, case, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Mapped, Session, defer, mapped_column

from controlplane.errors import ConflictError, StaleIndexError
from controlplane.policies.lifecycle import PLAN, PlanState, can_move, require_move
from controlplane.store.fleet import bump_index, fleet_index
from controlplane.store.layouts import as_planned, want_planned
from controlplane.store.rows import Page, matching, page, require
from controlplane.store.tables import Base, Json, one_of

AUTOMATIC = "automatic"
"""`approved_by` of a plan that the policy let pass."""
RESTORED = "restored"
"""`status` of a plan that no solver made: a rollback."""
SCHEDULE = "schedule"
_ENDED = (PlanState.SUPERSEDED, PlanState.FAILED, PlanState.ROLLED_BACK, PlanState.REJECTED)

_HOUR_S = 3600


class Plan(Base):
    """One hour's placement. The schedule makes at most one per window, failed attempts aside; at most one plan is in
    force. `approval_reason`: why it waits, or waited, for an operator. `inputs`: the solver's inputs. `layouts`: the
    nodes whose GPUs it regroups, with the sizes of their slots before and after.
    """

    __tablename__ = "plans"
    __table_args__ = (
        one_of("state", PlanState),
        CheckConstraint("origin IN ('schedule', 'operator')", name="origin_known"),
        Index(
            "uq_plans_schedule_window",
            "window_start_s",
            unique=True,
            postgresql_where=text("origin = 'schedule' AND state <> 'failed'"),
        ),
        Index("uq_plans_in_force", "state", unique=True, postgresql_where=text("state IN ('applying', 'applied')")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    origin: Mapped[str]
    window_start_s: Mapped[int]
    fleet_index: Mapped[int]
    solver: Mapped[str]
    status: Mapped[str]
    objective_per_hour: Mapped[float | None]
    bound_per_hour: Mapped[float | None]
    gap: Mapped[float | None]
    solve_time_s: Mapped[float]
    unserved: Mapped[list[Any]]
    pools: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    layouts: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    reason: Mapped[str]
    inputs: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    previous_plan_id: Mapped[str | None] = mapped_column(ForeignKey("plans.id"))
    approval_reason: Mapped[str | None]
    approved_by: Mapped[str | None]
    approved_at: Mapped[datetime | None]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    applied_at: Mapped[datetime | None]


class PlanEntry(Base):
    """One cell of a plan: instances before and after, why, what makes it necessary, and the cost per hour of leaving it
    as it was.
    """

    __tablename__ = "plan_entries"
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id", ondelete="CASCADE"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    gpu_type: Mapped[str] = mapped_column(primary_key=True)
    before: Mapped[int]
    after: Mapped[int]
    reason: Mapped[str]
    constraint: Mapped[str] = mapped_column(server_default=text("'none'"))
    cost_if_not: Mapped[float] = mapped_column(server_default=text("0"))


_ENTRY_COLUMNS = [column.name for column in PlanEntry.__table__.columns]
_COLUMNS = [column.name for column in Plan.__table__.columns if column.name not in {"created_at", "applied_at"}]


def new_plan_id() -> str:
    """A plan's id; later ones sort after earlier ones."""
    return f"plan_{uuid_utils.uuid7().hex}"


def add_plan(session: Session, plan: Plan, entries: Sequence[PlanEntry]) -> bool:
    """Write a plan. False, and nothing written, if the schedule has made this window's plan already. Failed attempts
    do not count: there may be many.
    """
    made = session.scalar(
        insert(Plan)
        .values(**_values(plan, _COLUMNS))
        .on_conflict_do_nothing(
            index_elements=["window_start_s"], index_where=text("origin = 'schedule' AND state <> 'failed'")
        )
        .returning(Plan.id)
    )
    if made is None:
        return False
    if entries:
        session.execute(insert(PlanEntry), [_values(entry, _ENTRY_COLUMNS) for entry in entries])
    return True


def is_planned(session: Session, window_start_s: int) -> bool:
    """Whether the schedule has made this window's plan, be it in force or waiting for an operator or rejected by one,
    or an operator's plan of it is in force. A failed attempt is no plan.
    """
    made = (Plan.origin == SCHEDULE) & (Plan.state != PlanState.FAILED)
    query = select(Plan.id).where(Plan.window_start_s == window_start_s, or_(made, Plan.state == PlanState.APPLIED))
    return session.scalar(query.limit(1)) is not None


def get_plan(session: Session, plan_id: str) -> Plan:
    """A plan by its id; NotFoundError where there is none."""
    return require(session, Plan, plan_id, param="plan_id")


def list_plans(session: Session, *, state: PlanState | None, after: str | None, limit: int) -> Page[Plan]:
    """One page of plans, the newest first, without what they could not serve, their pools and layouts, which may be
    long.
    """
    long = (defer(Plan.unserved), defer(Plan.pools), defer(Plan.layouts))
    query = select(Plan).where(*matching(Plan, {"state": state})).options(*long)
    return page(session, query, after=after, limit=limit, newest_first=True)


def inputs_of(session: Session, plan_id: str) -> Json | None:
    """The solver's inputs and their sources; None for plans without a solver, or older than this record.

    Raises:
        NotFoundError: no such plan.
    """
    get_plan(session, plan_id)
    return session.scalar(select(Plan.inputs).where(Plan.id == plan_id))


def entries_of(session: Session, plan_id: str) -> list[PlanEntry]:
    """The cells of a plan, by model, region, GPU type."""
    query = select(PlanEntry).where(PlanEntry.plan_id == plan_id)
    return list(session.scalars(query.order_by(PlanEntry.model, PlanEntry.region, PlanEntry.gpu_type)))


def plan_in_force(session: Session) -> Plan | None:
    """The applied plan, if there is one."""
    return session.scalar(select(Plan).where(Plan.state == PlanState.APPLIED))


def newest_scheduled(session: Session) -> Plan | None:
    """The last plan that the schedule made or failed to make."""
    return session.scalar(select(Plan).where(Plan.origin == SCHEDULE).order_by(Plan.id.desc()).limit(1))


def apply_plan(session: Session, plan_id: str, *, index: int, now_s: float, approved_by: str = AUTOMATIC) -> Plan:
    """Apply a plan in place of the present one. Applying the plan in force again changes nothing.

    Raises:
        NotFoundError: no such plan.
        StaleIndexError: the fleet changed since the plan was made, or since the caller looked.
        ConflictError: the plan's life is over, or its hour is.
    """
    present_index = fleet_index(session, lock=True)
    plan = get_plan(session, plan_id)
    if plan.state == PlanState.APPLIED:
        return plan
    if not (can_move(PLAN, PlanState(plan.state), PlanState.APPROVED) or plan.state == PlanState.APPROVED):
        raise ConflictError(f"plan '{plan_id}' is {plan.state}; make a new one", param="plan_id")
    if now_s >= plan.window_start_s + _HOUR_S:
        raise ConflictError(f"the hour of plan '{plan_id}' is over; make a new one", param="plan_id")
    if index != plan.fleet_index or present_index != plan.fleet_index:
        raise StaleIndexError(
            f"plan '{plan_id}' was made at index {plan.fleet_index}, asked for at {index}, and the fleet is at"
            f" {present_index}; make a new plan",
            param="index",
        )
    present = plan_in_force(session)
    if present is not None:
        _move(session, present, PlanState.SUPERSEDED)
    _put_in_force(session, plan, previous=present, approved_by=approved_by)
    return plan


def approve_plan(session: Session, plan_id: str, *, now_s: float, approved_by: str) -> Plan:
    """Approve a plan that waits: it is applied if the fleet has not changed since it was made.

    Raises:
        NotFoundError: no such plan.
        StaleIndexError: the fleet changed since the plan was made.
        ConflictError: the plan's life is over, or its hour is.
    """
    fleet_index(session, lock=True)
    index = get_plan(session, plan_id).fleet_index
    return apply_plan(session, plan_id, index=index, now_s=now_s, approved_by=approved_by)


def reject_plan(session: Session, plan_id: str, *, rejected_by: str, note: str) -> Plan:
    """Reject a draft; the present plan stays, and the schedule makes no other plan for that hour.

    Raises:
        NotFoundError: no such plan.
        ConflictError: it is no draft any more.
    """
    fleet_index(session, lock=True)
    plan = get_plan(session, plan_id)
    if plan.state == PlanState.REJECTED:
        return plan
    if plan.state != PlanState.DRAFT:
        raise ConflictError(f"plan '{plan_id}' is {plan.state}; only a draft can be rejected", param="plan_id")
    plan.reason += f"; rejected by {rejected_by}{f': {note}' if note else ''}"
    _move(session, plan, PlanState.REJECTED)
    return plan


def supersede_drafts(session: Session, *, before_s: int) -> list[str]:
    """End scheduled plans that still wait for an operator and whose window starts before `before_s`: another hour is
    planned now. An operator's own drafts end an hour later, when they can no longer be applied. Returns their ids.
    """
    ends_s = before_s - case((Plan.origin == SCHEDULE, 0), else_=_HOUR_S)
    waiting = select(Plan).where(Plan.state == PlanState.DRAFT, Plan.window_start_s < ends_s)
    if session.scalar(waiting.limit(1)) is None:
        return []
    fleet_index(session, lock=True)
    late = list(session.scalars(waiting.order_by(Plan.id), execution_options={"populate_existing": True}))
    for plan in late:
        _move(session, plan, PlanState.SUPERSEDED)
    return [plan.id for plan in late]


def fail_stale_drafts(session: Session, *, window_start_s: int) -> list[str]:
    """End scheduled plans of this window that wait for an operator and were made for a fleet that is no more: they can
    never be approved, and their hour can be planned again. Returns their ids.
    """
    index = fleet_index(session, lock=True)
    waiting = select(Plan).where(Plan.origin == SCHEDULE, Plan.state == PlanState.DRAFT)
    stale = list(session.scalars(waiting.where(Plan.window_start_s == window_start_s, Plan.fleet_index != index)))
    for plan in stale:
        plan.reason += f"; the fleet changed (index {index}) before anybody approved it"
        _move(session, plan, PlanState.FAILED)
    return [plan.id for plan in stale]


def roll_back(session: Session, plan_id: str, *, window_start_s: int, by: str, note: str) -> Plan:
    """Put the placement before the plan in force back in force, as a new plan of its own. Rolling that back in turn
    restores what was rolled back here.

    Args:
        plan_id: the plan in force; a caller that looked too early is refused.
        window_start_s: the hour in which the schedule shall not plan again.
        by: the operator. note: why, in the operator's words.

    Raises:
        NotFoundError: no such plan.
        ConflictError: the plan is not in force, or nothing was in force before it.
    """
    index = fleet_index(session, lock=True)
    plan = get_plan(session, plan_id)
    if plan.state != PlanState.APPLIED:
        present = plan_in_force(session)
        words = "no plan is" if present is None else f"'{present.id}' is"
        raise ConflictError(f"plan '{plan_id}' is {plan.state}, not in force; {words}", param="plan_id")
    if plan.previous_plan_id is None:
        raise ConflictError(
            f"nothing was in force before plan '{plan_id}'; there is no placement to go back to", param="plan_id"
        )
    previous = get_plan(session, plan.previous_plan_id)
    restored = Plan(
        id=new_plan_id(),
        state=PlanState.DRAFT,
        origin="operator",
        window_start_s=max(window_start_s, plan.window_start_s),
        fleet_index=index,
        solver="none",
        status=RESTORED,
        solve_time_s=0.0,
        unserved=previous.unserved,
        pools=_restored_pools(plan.pools, previous.pools),
        layouts=_restored_layouts(plan.id, as_planned(session, plan.layouts)),
        reason=f"takes back plan {plan.id}: the placement of plan {previous.id} again{f'; {note}' if note else ''}",
        created_by=by,
    )
    _move(session, plan, PlanState.ROLLED_BACK)
    session.add(restored)
    session.flush()
    session.add_all(_restored_entries(restored.id, entries_of(session, plan.id), entries_of(session, previous.id)))
    _put_in_force(session, restored, previous=plan, approved_by=by)
    return restored


def _restored_entries(plan_id: str, now: Sequence[PlanEntry], before: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Cells that lead from one plan's counts back to those of the plan before it."""
    present = {(entry.model, entry.region, entry.gpu_type): entry.after for entry in now}
    wanted = {(entry.model, entry.region, entry.gpu_type): entry for entry in before}
    return [
        PlanEntry(
            plan_id=plan_id,
            model=cell[0],
            region=cell[1],
            gpu_type=cell[2],
            before=present.get(cell, 0),
            after=wanted[cell].after if cell in wanted else 0,
            reason=f"as in plan {wanted[cell].plan_id}" if cell in wanted else "the plan before had none here",
        )
        for cell in sorted({*present, *wanted})
    ]


def _restored_pools(now: Sequence[Json], before: Sequence[Json]) -> list[Any]:
    """Pools that lead from one plan's sizes back to those of the plan before it. A plan of an older release does not
    say how many GPUs the workers of a pool have, nor does what restores it.
    """
    present, wanted = _by_key(now), _by_key(before)
    return [
        {
            "region": key[0],
            "gpu_type": key[1],
            "before": present[key]["after"] if key in present else 0,
            "after": wanted[key]["after"] if key in wanted else 0,
            "pooled": wanted[key]["pooled"] if key in wanted else [],
        }
        | ({"worker_gpus": key[2]} if key[2] else {})
        | ({"reserve": wanted[key]["reserve"]} if "reserve" in wanted.get(key, {}) else {})
        for key in sorted({*present, *wanted})
    ]


def _by_key(pools: Sequence[Json]) -> dict[tuple[str, str, int], Json]:
    return {(pool["region"], pool["gpu_type"], pool.get("worker_gpus", 0)): pool for pool in pools}


def _restored_layouts(plan_id: str, layouts: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The layouts that nodes had before a plan."""
    reason = f"as before plan {plan_id}"
    return [{**each, "before": each["after"], "after": each["before"], "reason": reason} for each in layouts]


def _values(row: Plan | PlanEntry, columns: Sequence[str]) -> dict[str, Any]:
    """The columns that are set; the database has the defaults of the others."""
    return {name: value for name in columns if (value := getattr(row, name)) is not None}


def _put_in_force(session: Session, plan: Plan, *, previous: Plan | None, approved_by: str) -> None:
    """The rest of a plan's way to being the one in force; nothing else may be in force now."""
    now = session.scalar(select(func.now()))
    for state in (PlanState.APPROVED, PlanState.APPLYING, PlanState.APPLIED):
        if plan.state != state:
            _move(session, plan, state)
    plan.previous_plan_id = None if previous is None else previous.id
    plan.approved_by, plan.approved_at, plan.applied_at = approved_by, now, now
    bump_index(session)
    session.flush()
    actor = plan.created_by if approved_by == AUTOMATIC else approved_by
    want_planned(session, plan.id, plan.layouts, actor=actor)


def _move(session: Session, plan: Plan, state: PlanState) -> None:
    require_move(PLAN, PlanState(plan.state), state)
    plan.state = state
    session.flush()


def forget_plans(session: Session, *, keep_s: int, count_max: int) -> int:
    """Delete at most `count_max` plans that ended and were made more than `keep_s` seconds ago; returns how many. The
    plan before the one in force stays, whatever its age.
    """
    in_force = Plan.state.in_((PlanState.APPLYING, PlanState.APPLIED))
    restorable = select(Plan.previous_plan_id).where(in_force, Plan.previous_plan_id.is_not(None))
    made_before = func.now() - timedelta(seconds=keep_s)
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
