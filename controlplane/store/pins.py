"""Pins: an operator keeps an endpoint at a number of instances until some time. Plans and scaling both hold to them."""

from collections.abc import Mapping
from datetime import UTC, datetime

import uuid_utils
from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, func, select, text, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.errors import ConflictError
from controlplane.policies.facts import Endpoint
from controlplane.store.fleet import bump_index, fleet_index
from controlplane.store.rows import Page, page, require
from controlplane.store.tables import Base, EndpointRow


class Pin(Base):
    """An operator's word: this endpoint has just so many instances until then. One live pin for each endpoint."""

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


def pins_in_force(session: Session, now_s: float) -> Mapping[Endpoint, int]:
    """Instances that each pinned endpoint must have at `now_s` (Unix time): not fewer and not more."""
    at = datetime.fromtimestamp(now_s, UTC)
    rows = session.scalars(select(Pin).where(Pin.removed_at.is_(None), Pin.until > at))
    return {Endpoint(model=pin.model, region=pin.region): pin.instances for pin in rows}


def add_pin(
    session: Session, *, endpoint: Endpoint, instances: int, until: datetime, note: str, created_by: str
) -> Pin:
    """Pin an endpoint. The fleet's index rises: plans made without the pin are stale.

    Raises:
        NotFoundError: the model is not offered in the region.
        ConflictError: it is pinned already.
    """
    fleet_index(session, lock=True)
    require(session, EndpointRow, (endpoint.model, endpoint.region), param="model")
    _close_ended(session)
    live = (Pin.model == endpoint.model, Pin.region == endpoint.region, Pin.removed_at.is_(None))
    present = session.scalar(select(Pin).where(*live))
    if present is not None:
        raise ConflictError(
            f"{endpoint.model} in {endpoint.region} is pinned to {present.instances} instances until"
            f" {present.until.isoformat()} already (pin '{present.id}'); remove that pin first",
            param="model",
        )
    pin = Pin(
        id=f"pin_{uuid_utils.uuid7().hex}",
        model=endpoint.model,
        region=endpoint.region,
        instances=instances,
        until=until,
        note=note,
        created_by=created_by,
    )
    session.add(pin)
    bump_index(session)
    session.flush()
    return pin


def remove_pin(session: Session, pin_id: str) -> Pin:
    """End a pin now; one that has ended already is left as it is. The fleet's index rises.

    Raises:
        NotFoundError: there is none of that id.
    """
    fleet_index(session, lock=True)
    _close_ended(session)
    pin = get_pin(session, pin_id)
    if pin.removed_at is None:
        pin.removed_at = session.scalar(select(func.now()))
        bump_index(session)
        session.flush()
    return pin


def get_pin(session: Session, pin_id: str) -> Pin:
    """A pin by its id; NotFoundError where there is none."""
    return require(session, Pin, pin_id, param="pin_id")


def list_pins(session: Session, *, after: str | None, limit: int, live_only: bool) -> Page[Pin]:
    """One page of pins, the oldest first."""
    query = select(Pin)
    if live_only:
        query = query.where(Pin.removed_at.is_(None), Pin.until > func.now())
    return page(session, query, after=after, limit=limit)


def _close_ended(session: Session) -> None:
    """A pin whose time is over makes room for the next of its endpoint; that changes no plan and no index."""
    session.execute(update(Pin).where(Pin.removed_at.is_(None), Pin.until <= func.now()).values(removed_at=Pin.until))
