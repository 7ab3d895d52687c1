"""Spot (donated idle) instances and their leases."""

from collections.abc import Mapping
from datetime import datetime

from fastapi import APIRouter, BackgroundTasks
from pydantic import Field

from controlplane.api.admin.fields import After, Answer, InstancePath, Limit, PageOf
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import Body, KeyName, PositiveNumber
from controlplane.errors import InvalidValueError
from controlplane.planner.schedule import enqueue
from controlplane.policies.lifecycle import InstanceState
from controlplane.store import leases, tables
from controlplane.store.instances import touch_generations
from controlplane.store.keys import record, snapshot

router = APIRouter(tags=["admin: fleet"], route_class=IdempotentRoute)


class Lease(Answer):
    """The use of a spot instance for some time."""

    id: str = Field(examples=["lease_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    instance_id: str
    holder: str
    created_by: str
    created_at: datetime
    expires_at: datetime
    reclaim_at: datetime | None = Field(description="notice was given: the lease ends then at the latest")
    ended_at: datetime | None
    end_reason: str | None = Field(description="returned, expired, reclaimed or lost")


class SpotInstance(Answer):
    """An instance that we do not need now; it keeps its model."""

    instance_id: str
    model: str
    region: str
    gpu_type: str
    gpus: int
    node: str
    slot: int
    spot_at: datetime = Field(description="since when it is lent out")
    ready: bool = Field(description="whether its node has the model loaded; only then it can be leased")
    lease: Lease | None


class NewLease(Body):
    """Who leases, and for how long."""

    holder: KeyName = Field(description="who uses the instance; a name for people and the audit")
    duration_s: PositiveNumber = Field(description="seconds, within spot_lease_min_s and spot_lease_max_s")


@router.get("/spot", summary="List spot instances")
def list_spot(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[SpotInstance]:
    """Donated instances by id, with their leases."""
    page = leases.list_donated(session, after=after, limit=limit)
    active = leases.active_leases(session)
    return PageOf(data=[_shown(row, active) for row in page.rows], has_more=page.has_more, next=page.next)


@router.post("/spot/{instance_id}/lease", summary="Lease a spot instance", status_code=201)
def lease_spot(
    instance_id: InstancePath, body: NewLease, session: SessionDep, state: StateDep, caller: Operator
) -> Lease:
    """The lease ends by itself. It is revoked with notice (`reclaim_at`) when the fleet needs the GPUs, and answers 409
    where the instance is leased already or not spot any more.
    """
    least, most = state.settings.spot_lease_min_s, state.settings.spot_lease_max_s
    if not least <= body.duration_s <= most:
        raise InvalidValueError(
            f"duration_s: must be from {least:g} to {most:g}, got {body.duration_s:g}", param="duration_s"
        )
    lease = leases.lease_instance(
        session, instance_id, holder=body.holder, duration_s=body.duration_s, created_by=caller.name
    )
    _notify_node(session, instance_id)
    record(session, actor=caller.name, action="spot.lease", subject=instance_id, after=snapshot(lease))
    return Lease.model_validate(lease)


@router.delete("/spot/{instance_id}/lease", summary="Return a spot instance")
def return_spot(
    instance_id: InstancePath, session: SessionDep, caller: Operator, after_commit: BackgroundTasks
) -> Lease:
    """Ends the lease now; the instance may be leased again, or taken back."""
    leased = leases.active_leases(session).get(instance_id)
    before = None if leased is None else snapshot(leased)
    lease = leases.return_lease(session, instance_id)
    _notify_node(session, instance_id)
    record(session, actor=caller.name, action="spot.return", subject=instance_id, before=before, after=snapshot(lease))
    if lease.reclaim_at is not None:
        after_commit.add_task(enqueue, "scale")  # who gave notice waits for it
    return Lease.model_validate(lease)


def _notify_node(session: SessionDep, instance_id: str) -> None:
    """The node lets requests of the lease in, or no more."""
    touch_generations(session, [session.get_one(tables.Instance, instance_id).node])


def _shown(row: tables.Instance, active: Mapping[str, tables.InstanceLease]) -> SpotInstance:
    lease = active.get(row.id)
    return SpotInstance.model_validate(
        snapshot(row)
        | {
            "instance_id": row.id,
            "ready": row.observed == InstanceState.SPOT,
            "lease": None if lease is None else Lease.model_validate(lease),
        }
    )
