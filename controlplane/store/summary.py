"""Counts of everything at one moment, for people who ask how the fleet is."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import InstanceState, PlanState
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.plan_tables import Plan
from controlplane.store.plans import newest_scheduled
from controlplane.store.tables import Desired, Instance, Model, Node, Region, Slot


@dataclass(frozen=True, kw_only=True)
class RegionSummary:
    """One region: its nodes, those heard of lately, their GPUs, and how many instances are live and ready."""

    name: str
    position: int
    nodes: int
    nodes_alive: int
    gpus: int
    instances: int
    instances_ready: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The whole. Instances are the live ones by observed state, and how many of them are pooled; `plan` is the one in
    force, `scheduled` the schedule's newest, whatever became of it.
    """

    models: int
    regions: tuple[RegionSummary, ...]
    nodes_draining: int
    instances: Mapping[str, int]
    instances_pooled: int
    batches: Mapping[str, int]
    requests_waiting: int
    requests_running: int
    plan: Plan | None
    scheduled: Plan | None


def read_summary(session: Session, *, alive_s: float) -> Summary:
    """Count everything. A node is alive if it was heard of in the last `alive_s` seconds."""
    instances = select(Instance.observed, func.count()).where(Instance.desired != Desired.STOPPED)
    pooled = select(func.count()).where(Instance.pooled, Instance.desired != Desired.STOPPED)
    batches = select(Batch.state, func.count()).group_by(Batch.state)
    return Summary(
        models=session.scalar(select(func.count()).select_from(Model)) or 0,
        regions=_regions(session, alive_s=alive_s),
        nodes_draining=session.scalar(select(func.count()).where(Node.draining)) or 0,
        instances=dict(session.execute(instances.group_by(Instance.observed)).all()),
        instances_pooled=session.scalar(pooled) or 0,
        batches=dict(session.execute(batches).all()),
        requests_waiting=_requests(session, QueuedRequest.lease_until.is_(None)),
        requests_running=_requests(session, QueuedRequest.lease_until.is_not(None)),
        plan=session.scalar(select(Plan).where(Plan.state.in_((PlanState.APPLYING, PlanState.APPLIED)))),
        scheduled=newest_scheduled(session),
    )


def node_ages_s(session: Session, nodes: list[str]) -> dict[str, float | None]:
    """Seconds since each node was heard of, on Postgres's clock; None if it never was."""
    age_s = func.extract("epoch", func.clock_timestamp() - Node.last_seen_at)
    rows = session.execute(select(Node.name, age_s).where(Node.name.in_(nodes)))
    return {name: None if age is None else max(0.0, float(age)) for name, age in rows}


def _requests(session: Session, where: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).select_from(QueuedRequest).where(where)) or 0


def _regions(session: Session, *, alive_s: float) -> tuple[RegionSummary, ...]:
    alive = func.extract("epoch", func.clock_timestamp() - Node.last_seen_at) <= alive_s
    nodes = {
        region: (total, live)
        for region, total, live in session.execute(
            select(Node.region, func.count(), func.count().filter(alive)).group_by(Node.region)
        )
    }
    gpus = dict(
        session.execute(
            select(Node.region, func.sum(Slot.gpus)).join(Slot, Slot.node == Node.name).group_by(Node.region)
        ).all()
    )
    ready = func.count().filter(Instance.observed == InstanceState.READY)
    instances = {
        region: (total, good)
        for region, total, good in session.execute(
            select(Instance.region, func.count(), ready)
            .where(Instance.desired != Desired.STOPPED)
            .group_by(Instance.region)
        )
    }
    return tuple(
        RegionSummary(
            name=region.name,
            position=region.position,
            nodes=nodes.get(region.name, (0, 0))[0],
            nodes_alive=nodes.get(region.name, (0, 0))[1],
            gpus=int(gpus.get(region.name, 0)),
            instances=instances.get(region.name, (0, 0))[0],
            instances_ready=instances.get(region.name, (0, 0))[1],
        )
        for region in session.scalars(select(Region).order_by(Region.position, Region.name))
    )
