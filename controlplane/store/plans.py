"""Plans: written once, applied once. Applying checks the fleet's index under the fleet's lock."""

from collections.abc import Sequence

from sqlalchemy import func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, NotFoundError, StaleIndexError
from controlplane.policies.lifecycle import PLAN, PlanState, can_move, require_move
from controlplane.store.fleet import bump_index, fleet_index
from controlplane.store.paging import Page, page
from controlplane.store.tables import Plan, PlanEntry

_COLUMNS = [column.name for column in Plan.__table__.columns if column.name not in {"created_at", "applied_at"}]


def add_plan(session: Session, plan: Plan, entries: Sequence[PlanEntry]) -> bool:
    """Write a plan. False, and nothing written, if the schedule has made this window's plan already."""
    values = {name: getattr(plan, name) for name in _COLUMNS}
    made = session.scalar(
        insert(Plan)
        .values(**values)
        .on_conflict_do_nothing(index_elements=["window_start_s"], index_where=Plan.origin == "schedule")
        .returning(Plan.id)
    )
    if made is None:
        return False
    session.add_all(entries)
    session.flush()
    return True


def is_planned(session: Session, window_start_s: int) -> bool:
    """Whether the schedule has made this window's plan, or an operator's plan of it is in force."""
    made = or_(Plan.origin == "schedule", Plan.state == PlanState.APPLIED)
    query = select(Plan.id).where(Plan.window_start_s == window_start_s, made).limit(1)
    return session.scalar(query) is not None


def get_plan(session: Session, plan_id: str) -> Plan:
    """A plan by its id.

    Raises:
        NotFoundError: there is none.
    """
    plan = session.get(Plan, plan_id)
    if plan is None:
        raise NotFoundError(f"plan '{plan_id}' does not exist", param="plan_id")
    return plan


def entries_of(session: Session, plan_id: str) -> list[PlanEntry]:
    """The cells of a plan, by model, region, GPU type."""
    query = select(PlanEntry).where(PlanEntry.plan_id == plan_id)
    return list(session.scalars(query.order_by(PlanEntry.model, PlanEntry.region, PlanEntry.gpu_type)))


def list_plans(session: Session, *, after: str | None, limit: int) -> Page[Plan]:
    """One page of plans, the newest first."""
    return page(session, select(Plan), Plan.id, after=after, limit=limit, newest_first=True)


def plan_in_force(session: Session) -> Plan | None:
    """The applied plan, if there is one."""
    return session.scalar(select(Plan).where(Plan.state == PlanState.APPLIED))


def apply_plan(session: Session, plan_id: str, *, index: int) -> Plan:
    """Put a plan in force in place of the present one. Applying the plan in force again changes nothing.

    Raises:
        NotFoundError: no such plan.
        StaleIndexError: the fleet changed since the plan was made, or since the caller looked.
        ConflictError: the plan's life is over.
    """
    present_index = fleet_index(session, lock=True)
    plan = get_plan(session, plan_id)
    if plan.state == PlanState.APPLIED:
        return plan
    if not (can_move(PLAN, PlanState(plan.state), PlanState.APPROVED) or plan.state == PlanState.APPROVED):
        raise ConflictError(f"plan '{plan_id}' is {plan.state}; make a new one", param="plan_id")
    if index != plan.fleet_index or present_index != plan.fleet_index:
        raise StaleIndexError(
            f"plan '{plan_id}' was made at index {plan.fleet_index}, asked for at {index}, and the fleet is at"
            f" {present_index}; make a new plan",
            param="index",
        )
    _supersede_present(session)
    for state in (PlanState.APPROVED, PlanState.APPLYING, PlanState.APPLIED):
        if plan.state != state:
            require_move(PLAN, PlanState(plan.state), state)
            plan.state = state
    plan.applied_at = session.scalar(select(func.now()))
    bump_index(session)
    session.flush()
    return plan


def _supersede_present(session: Session) -> None:
    present = plan_in_force(session)
    if present is not None:
        require_move(PLAN, PlanState(present.state), PlanState.SUPERSEDED)
        present.state = PlanState.SUPERSEDED
        session.flush()
