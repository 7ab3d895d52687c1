"""Counts of everything at one moment, for people who ask how the fleet is."""

from collections import Counter
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import InstanceState, PlanState, shown_state
from controlplane.store.batch_ends import read_risk
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.fleet import heard_of
from controlplane.store.plan_changes import cost_of
from controlplane.store.plans import Plan, newest_scheduled
from controlplane.store.tables import Desired, Instance, Model, Node, Region, Slot


def read_summary(session: Session, *, alive_s: float) -> dict[str, Any]:
    """Counts by the names of the API's status. Instances are the live ones by shown state; `plan` is the one in force,
    `planning` the schedule's newest, in whatever state. A node is alive if it sent a heartbeat in the last `alive_s`
    seconds.
    """
    instances = _instances(session, alive_s=alive_s)
    by_state: Counter[str] = Counter()
    for (_, state), count in instances.items():
        by_state[state] += count
    pooled = select(func.count()).where(Instance.pooled, Instance.desired != Desired.STOPPED)
    batches = select(Batch.state, func.count()).group_by(Batch.state)
    return {
        "models": session.scalar(select(func.count()).select_from(Model)) or 0,
        "regions": _regions(session, instances, alive_s=alive_s),
        "nodes_draining": session.scalar(select(func.count()).where(Node.draining)) or 0,
        "instances": by_state,
        "instances_pooled": session.scalar(pooled) or 0,
        "batches": dict(session.execute(batches).all()),
        "batches_at_risk": read_risk(session)[0],
        "requests_waiting": _requests(session, QueuedRequest.lease_until.is_(None)),
        "requests_running": _requests(session, QueuedRequest.lease_until.is_not(None)),
        "plan": _plan(session),
        "planning": newest_scheduled(session),
    }


def _plan(session: Session) -> dict[str, Any] | None:
    """The plan in force with the price of its GPUs."""
    plan = session.scalar(select(Plan).where(Plan.state.in_((PlanState.APPLYING, PlanState.APPLIED))))
    if plan is None:
        return None
    names = ("id", "state", "status", "window_start_s", "applied_at", "objective_per_hour", "reason")
    return {name: getattr(plan, name) for name in names} | {"cost_per_hour": cost_of(session, plan)}


def _instances(session: Session, *, alive_s: float) -> Counter[tuple[str, str]]:
    """The live instances by region and shown state."""
    rows = session.execute(
        select(Instance.region, Instance.observed, heard_of(alive_s).label("alive"), func.count())
        .join(Node, Node.name == Instance.node)
        .where(Instance.desired != Desired.STOPPED)
        .group_by(Instance.region, Instance.observed, "alive")
    )
    counts: Counter[tuple[str, str]] = Counter()
    for region, observed, alive, count in rows:
        counts[region, shown_state(observed, node_alive=alive)] += count
    return counts


def _requests(session: Session, where: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).select_from(QueuedRequest).where(where)) or 0


def _regions(session: Session, instances: Counter[tuple[str, str]], *, alive_s: float) -> list[dict[str, Any]]:
    nodes = {
        region: (total, live)
        for region, total, live in session.execute(
            select(Node.region, func.count(), func.count().filter(heard_of(alive_s))).group_by(Node.region)
        )
    }
    gpus = dict(
        session.execute(
            select(Node.region, func.sum(Slot.gpus)).join(Slot, Slot.node == Node.name).group_by(Node.region)
        ).all()
    )
    return [
        {
            "name": region.name,
            "position": region.position,
            "nodes": nodes.get(region.name, (0, 0))[0],
            "nodes_alive": nodes.get(region.name, (0, 0))[1],
            "gpus": int(gpus.get(region.name, 0)),
            "instances": sum(count for (name, _), count in instances.items() if name == region.name),
            "instances_ready": instances[region.name, InstanceState.READY],
        }
        for region in session.scalars(select(Region).order_by(Region.position, Region.name))
    ]
