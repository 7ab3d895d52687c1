"""Events: reading them, forgetting old ones, and the one kind that no change of a row tells of: a node that is lost."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from sqlalchemy import func, insert, literal, select
from sqlalchemy.orm import Session

from controlplane.store.event_tables import Event
from controlplane.store.retention import delete_some
from controlplane.store.rows import Page, matching, page
from controlplane.store.tables import Node


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


def forget_events(session: Session, *, keep_s: float, count_max: int) -> int:
    """Delete at most `count_max` events that are older than `keep_s` seconds; returns how many."""
    old = Event.at < func.now() - timedelta(seconds=keep_s)
    return delete_some(session, Event, old, order=Event.at, count_max=count_max)
