"""Events: state changes made by the system. Changes made by people are in the audit."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, Field

from controlplane.api.admin.fields import AfterId, Answer, FilterWord, Limit, PageOf, page_of
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.store import events

router = APIRouter(tags=["admin: fleet"])


class Event(Answer):
    """One change of an instance, a node or a plan, or that a term of the primary began."""

    id: int
    at: datetime
    kind: Literal["instance", "node", "plan", "term", "rollout"]
    what: str = Field(description="its new state, or what became of it", examples=["ready"])
    subject: str = Field(description="id of the instance or plan, the node's name, or the term")
    model: str | None
    region: str | None
    node: str | None
    message: str | None = Field(description="why, where that is known")


@router.get("/events", summary="List what happened")
def list_events(
    session: SessionDep,
    _: Viewer,
    kind: Literal["instance", "node", "plan", "term", "rollout"] | None = None,
    what: FilterWord = None,
    subject: FilterWord = None,
    model: FilterWord = None,
    region: FilterWord = None,
    node: FilterWord = None,
    since: Annotated[AwareDatetime | None, Query(description="events from then on")] = None,
    limit: Limit = 20,
    after: AfterId = None,
) -> PageOf[Event]:
    """The newest first. They are kept for TIDEPOOL_EVENT_KEEP_DAYS."""
    which = {"kind": kind, "what": what, "subject": subject, "model": model, "region": region, "node": node}
    page = events.list_events(session, which=which, since=since, after=after, limit=limit)
    return page_of(Event, page)
