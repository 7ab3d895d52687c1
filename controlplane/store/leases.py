"""Donated instances and their leases. Whoever changes a lease holds the fleet's lock, so that a lease and a reclaim
never cross; the time is the database's. An instance has at most one active lease (a unique index).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import uuid_utils
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, NotFoundError
from controlplane.policies.lifecycle import InstanceState
from controlplane.store.fleet import fleet_index
from controlplane.store.rows import Page, page, require
from controlplane.store.tables import Desired, Instance, InstanceLease, LeaseEnd, Node

ACTIVE = InstanceLease.ended_at.is_(None)
_TAKE_BACK_S = 60
"""After a lease that had notice nobody else may lease the instance for so long: the fleet wants it."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A lease that ended, on which instance of which node."""

    lease: InstanceLease
    node: str


def list_donated(session: Session, *, after: str | None, limit: int) -> Page[Instance]:
    """One page of donated instances by id."""
    query = select(Instance).where(Instance.desired == Desired.SPOT)
    return page(session, query, after=after, limit=limit)


def donated_instance(session: Session, instance_id: str) -> Instance:
    """A donated instance.

    Raises:
        NotFoundError: no such instance.
        ConflictError: it is not donated, or not any more.
    """
    instance = require(session, Instance, instance_id, param="instance_id")
    if instance.desired != Desired.SPOT:
        raise ConflictError(f"instance '{instance_id}' is {instance.desired}, not spot", param="instance_id")
    return instance


def active_leases(session: Session, *, node: str | None = None) -> dict[str, InstanceLease]:
    """Active leases by instance: of the fleet, or of one node."""
    query = select(InstanceLease).where(ACTIVE)
    if node is not None:
        query = query.join(Instance, Instance.id == InstanceLease.instance_id).where(Instance.node == node)
    return {lease.instance_id: lease for lease in session.scalars(query)}


def lease_instance(
    session: Session, instance_id: str, *, holder: str, duration_s: float, created_by: str
) -> InstanceLease:
    """Lease a donated instance for some time.

    Raises:
        NotFoundError: no such instance.
        ConflictError: it is not donated (any more), leased already, not loaded, about to be reclaimed, or its node is
            being drained.
    """
    fleet_index(session, lock=True)
    instance = donated_instance(session, instance_id)
    if instance.observed != InstanceState.SPOT:
        raise ConflictError(f"instance '{instance_id}' is {instance.observed} on its node", param="instance_id")
    if not session.get_one(Node, instance.node).accepting:
        raise ConflictError(f"node '{instance.node}' is being drained or shutting down", param="instance_id")
    present = session.scalar(select(InstanceLease).where(ACTIVE, InstanceLease.instance_id == instance_id))
    if present is not None:
        until = _ends_at(present).isoformat(timespec="seconds")
        raise ConflictError(
            f"instance '{instance_id}' is leased by '{present.holder}' until {until}", param="instance_id"
        )
    now = _now(session)
    taken_back = select(InstanceLease.id).where(
        InstanceLease.instance_id == instance_id,
        InstanceLease.reclaim_at.is_not(None),
        InstanceLease.ended_at > now - timedelta(seconds=_TAKE_BACK_S),
    )
    if session.scalar(taken_back.limit(1)) is not None:
        raise ConflictError(f"instance '{instance_id}' is being taken back", param="instance_id")
    lease = InstanceLease(
        id=f"lease_{uuid_utils.uuid7().hex}",
        instance_id=instance_id,
        holder=holder,
        created_by=created_by,
        created_at=now,
        expires_at=now + timedelta(seconds=duration_s),
    )
    session.add(lease)
    session.flush()
    return lease


def return_lease(session: Session, instance_id: str) -> InstanceLease:
    """End the active lease of an instance.

    Raises:
        NotFoundError: no such instance, or nobody leases it.
    """
    fleet_index(session, lock=True)
    require(session, Instance, instance_id, param="instance_id")
    lease = session.scalar(select(InstanceLease).where(ACTIVE, InstanceLease.instance_id == instance_id))
    if lease is None:
        raise NotFoundError(f"nobody leases instance '{instance_id}'", param="instance_id")
    lease.ended_at, lease.end_reason = _now(session), LeaseEnd.RETURNED
    session.flush()
    return lease


def give_notice(session: Session, instance_ids: Iterable[str], *, notice_s: float) -> list[InstanceLease]:
    """Let active leases end in `notice_s` seconds; one that has notice already, or ends sooner, keeps its end."""
    reclaim_at = func.least(InstanceLease.expires_at, func.now() + timedelta(seconds=notice_s))
    noticed = session.scalars(
        update(InstanceLease)
        .where(ACTIVE, InstanceLease.instance_id.in_(list(instance_ids)), InstanceLease.reclaim_at.is_(None))
        .values(reclaim_at=reclaim_at)
        .returning(InstanceLease)
    )
    return list(noticed)


def end_due_leases(session: Session) -> list[Ended]:
    """End leases whose time is over, or whose notice is."""
    due = (
        func.least(InstanceLease.expires_at, func.coalesce(InstanceLease.reclaim_at, InstanceLease.expires_at))
        <= func.now()
    )
    rows = session.execute(
        select(InstanceLease, Instance.node)
        .join(Instance, Instance.id == InstanceLease.instance_id)
        .where(ACTIVE, due)
        .order_by(InstanceLease.id)
    ).all()
    now = _now(session)
    for lease, _ in rows:
        reclaimed = lease.reclaim_at is not None and lease.reclaim_at < lease.expires_at
        lease.ended_at, lease.end_reason = now, LeaseEnd.RECLAIMED if reclaimed else LeaseEnd.EXPIRED
    session.flush()
    return [Ended(lease=lease, node=node) for lease, node in rows]


def end_leases(session: Session, instance_ids: Iterable[str], reason: LeaseEnd) -> None:
    """End the active leases of instances now."""
    session.execute(
        update(InstanceLease)
        .where(ACTIVE, InstanceLease.instance_id.in_(list(instance_ids)))
        .values(ended_at=func.now(), end_reason=reason)
    )


def _ends_at(lease: InstanceLease) -> datetime:
    return lease.expires_at if lease.reclaim_at is None else min(lease.expires_at, lease.reclaim_at)


def _now(session: Session) -> datetime:
    return session.execute(select(func.now())).scalar_one()
