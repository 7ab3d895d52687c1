"""The table of events."""

from datetime import datetime

from sqlalchemy import CheckConstraint, Identity, Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.store.tables import Base


class Event(Base):
    """What the system did, one change of an instance, a node or a plan a row. Triggers of those tables write it, in the
    transaction of the change, whoever makes it (migration 0022). What people do is in the audit.
    """

    __tablename__ = "events"
    __table_args__ = (
        CheckConstraint("kind IN ('instance', 'node', 'plan')", name="kind_known"),
        Index("ix_events_at", "at"),
        Index("ix_events_subject", "subject", "id"),
    )
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    kind: Mapped[str]
    what: Mapped[str]
    subject: Mapped[str]
    model: Mapped[str | None]
    region: Mapped[str | None]
    node: Mapped[str | None]
    message: Mapped[str | None]
