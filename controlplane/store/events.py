"""Events: reading them, and writing that a node was lost, which no trigger sees."""

from collections.abc import Collection, Mapping
from datetime import datetime

from sqlalchemy import CheckConstraint, Identity, Index, func, insert, literal, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.store.rows import Page, matching, page
from controlplane.store.tables import Base, Node


class Event(Base):
    """What the system did, one change of an instance, a node or a plan a row. Triggers of those tables write it, in the
    transaction of the change, whoever makes it (migration 0022); that a term began is written by `terms`, and what
    becomes of a roll-out by `rollouts`. What people do is in the audit.
    """

    __tablename__ = "events"
    __table_args__ = (
        CheckConstraint("kind IN ('instance', 'node', 'plan', 'term', 'rollout')", name="kind_known"),
        Index("ix_events_at", "at"),
        Index("ix_events_subject", "subject", "id"),
        Index("ix_events_model", "model", "id"),
        Index("ix_events_node", "node", "id"),
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


def list_events(
    session: Session, *, which: Mapping[str, str | None], since: datetime | None, after: int | None, limit: int
) -> Page[Event]:
    """One page of events, the newest first. `which`: values by column; None: any."""
    query = select(Event).where(*matching(Event, which))
    if since is not None:
        query = query.where(Event.at >= since)
    return page(session, query, after=after, limit=limit, newest_first=True)


def note_lost(session: Session, nodes: Collection[str]) -> int:
    """That nodes have been silent for long; once for each silence. Returns how many were noted. A trigger notes when
    they return.
    """
    noted = select(Event.id).where(Event.subject == Node.name, Event.kind == "node", Event.what == "lost")
    age_s = func.round(func.extract("epoch", func.now() - Node.last_seen_at))
    lost = select(
        literal("node"), literal("lost"), Node.name, Node.region, Node.name, func.concat("silent for ", age_s, " s")
    ).where(Node.name.in_(nodes), ~noted.where(Event.at > Node.last_seen_at).exists())
    noted_now = insert(Event).from_select(["kind", "what", "subject", "region", "node", "message"], lost)
    return len(session.execute(noted_now.returning(Event.id)).all())
