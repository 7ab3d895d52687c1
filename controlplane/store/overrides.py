"""Replica overrides ("pins" in the API): an operator fixes an endpoint's number of instances until a time. Plans and
scaling both follow them.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import uuid_utils
from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, func, select, text, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.errors import ConflictError
from controlplane.policies.facts import Endpoint
from controlplane.store.fleet import bump_index, fleet_index
from controlplane.store.rows import Page, page, require
from controlplane.store.tables import Base, EndpointRow, Owned


class ReplicaOverride(Owned, Base):
    """An endpoint has exactly this many instances until then. At most one is in force for each endpoint."""

    __tablename__ = "pins"
    __table_args__ = (
        CheckConstraint("instances >= 0", name="positive"),
        ForeignKeyConstraint(["model", "region"], ["endpoints.model", "endpoints.region"], ondelete="CASCADE"),
        Index("uq_pins_live", "model", "region", unique=True, postgresql_where=text("removed_at IS NULL")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    region: Mapped[str]
    instances: Mapped[int]
    until: Mapped[datetime]
    note: Mapped[str]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    removed_at: Mapped[datetime | None]


def overrides_in_force(session: Session, now_s: float) -> Mapping[Endpoint, int]:
    """Instances that each endpoint with an override must have at `now_s` (Unix time): not fewer and not more."""
    at = datetime.fromtimestamp(now_s, UTC)
    rows = session.scalars(
        select(ReplicaOverride).where(ReplicaOverride.removed_at.is_(None), ReplicaOverride.until > at)
    )
    return {Endpoint(model=override.model, region=override.region): override.instances for override in rows}


def add_override(
    session: Session,
    *,
    endpoint: Endpoint,
    instances: int,
    until: datetime,
    note: str,
    created_by: str,
    owner: str | None = None,
) -> ReplicaOverride:
    """Fix an endpoint's number of instances. The fleet's index rises: plans made without the override are stale.

    Raises:
        NotFoundError: the model is not offered in the region.
        ConflictError: it has one in force already.
    """
    fleet_index(session, lock=True)
    require(session, EndpointRow, (endpoint.model, endpoint.region), param="model")
    _close_ended(session)
    live = (
        ReplicaOverride.model == endpoint.model,
        ReplicaOverride.region == endpoint.region,
        ReplicaOverride.removed_at.is_(None),
    )
    present = session.scalar(select(ReplicaOverride).where(*live))
    if present is not None:
        raise ConflictError(
            f"{endpoint.model} in {endpoint.region} is pinned to {present.instances} instances until"
            f" {present.until.isoformat()} already (pin '{present.id}'); remove that pin first",
            param="model",
        )
    override = ReplicaOverride(
        id=f"pin_{uuid_utils.uuid7().hex}",
        model=endpoint.model,
        region=endpoint.region,
        instances=instances,
        until=until,
        note=note,
        created_by=created_by,
        owner=owner,
    )
    session.add(override)
    bump_index(session)
    session.flush()
    return override


def remove_override(session: Session, pin_id: str) -> ReplicaOverride:
    """End an override now; one that has ended already is left as it is. The fleet's index rises.

    Raises:
        NotFoundError: there is none of that id.
    """
    fleet_index(session, lock=True)
    _close_ended(session)
    override = get_override(session, pin_id)
    if override.removed_at is None:
        override.removed_at = session.scalar(select(func.now()))
        bump_index(session)
        session.flush()
    return override


def get_override(session: Session, pin_id: str) -> ReplicaOverride:
    """An override by its id; NotFoundError where there is none."""
    return require(session, ReplicaOverride, pin_id, param="pin_id")


def list_overrides(session: Session, *, after: str | None, limit: int, live_only: bool) -> Page[ReplicaOverride]:
    """One page of overrides, the oldest first."""
    query = select(ReplicaOverride)
    if live_only:
        query = query.where(ReplicaOverride.removed_at.is_(None), ReplicaOverride.until > func.now())
    return page(session, query, after=after, limit=limit)


def _close_ended(session: Session) -> None:
    """Mark overrides whose time is over as removed, so that their endpoints can have new ones. The index stays."""
    session.execute(
        update(ReplicaOverride)
        .where(ReplicaOverride.removed_at.is_(None), ReplicaOverride.until <= func.now())
        .values(removed_at=ReplicaOverride.until)
    )
