"""Events: reading them, forgetting old ones, and the one kind that no change of a row tells of: a node that is lost."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from sqlalchemy import delete, func, insert, literal, select
from sqlalchemy.orm import Session

from controlplane.store.event_tables import Event
from controlplane.store.paging import Page, page
from controlplane.store.tables import Node


def list_events(
    session: Session, *, which: Mapping[str, str | None], since: datetime | None, after: int | None, limit: int
) -> Page[Event]:
    """One page of events, the newest first. `which`: values by column; None: any."""
    query = select(Event).where(*(getattr(Event, name) == value for name, value in which.items() if value is not None))
    if since is not None:
        query = query.where(Event.at >= since)
    return page(session, query, Event.id, after=after, limit=limit, newest_first=True)


def note_lost(session: Session, nodes: Collection[str]) -> None:
    """That nodes have been silent for long; once for each silence. A trigger notes when they return."""
    noted = select(Event.id).where(Event.subject == Node.name, Event.kind == "node", Event.what == "lost")
    age_s = func.round(func.extract("epoch", func.now() - Node.last_seen_at))
    lost = select(
        literal("node"), literal("lost"), Node.name, Node.region, Node.name, func.concat("silent for ", age_s, " s")
    ).where(Node.name.in_(nodes), ~noted.where(Event.at > Node.last_seen_at).exists())
    session.execute(insert(Event).from_select(["kind", "what", "subject", "region", "node", "message"], lost))


def forget_events(session: Session, *, keep_s: float) -> None:
    """Delete events that are older."""
    session.execute(delete(Event).where(Event.at < func.now() - timedelta(seconds=keep_s)))
