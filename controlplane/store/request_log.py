"""The request log: one row for each request that ended, written in pieces and forgotten after a while."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import DateTime, Identity, Index, String, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.store.rows import Page, copy_rows, matching, page
from controlplane.store.session import defer
from controlplane.store.tables import Base

OK, CANCELLED = "ok", "cancelled"


class LoggedRequest(Base):
    """How a request went. Its id may be its client's choice, so several may have the same."""

    __tablename__ = "request_log"
    __table_args__ = (Index(None, "request_id"), Index(None, "ended_at"))
    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    request_id: Mapped[str]
    ended_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    endpoint: Mapped[str]
    tenant: Mapped[str | None]
    key_id: Mapped[str | None]
    model: Mapped[str | None]
    tier: Mapped[str | None]
    region: Mapped[str | None]
    nodes: Mapped[list[str]] = mapped_column(ARRAY(String))
    continuations: Mapped[int]
    outcome: Mapped[str]
    status: Mapped[int]
    error: Mapped[str | None]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    placed_s: Mapped[float | None]
    first_token_s: Mapped[float | None]
    duration_s: Mapped[float]
    gateway: Mapped[str | None]
    trace_id: Mapped[str | None]
    origin: Mapped[str | None]
    instance_id: Mapped[str | None]
    utilization: Mapped[float | None]
    cached_tokens: Mapped[int | None]


class RequestRecord(msgspec.Struct, kw_only=True):
    """A request as it is logged, field for field a row. It never holds words of a prompt or an answer.

    `nodes`: those that were tried, in order. `outcome`: `ok`, `cancelled`, or the code of the error that its client was
    told, with its HTTP `status`. Seconds are from its arrival, to: a node has it, its first token, its end.
    `origin`: the region it counts for. Of the last attempt: its `instance_id`, and what routing knew of it, the
    `utilization` of its endpoint and how many tokens of the prompt it had likely cached.
    """

    request_id: str
    ended_at: datetime
    endpoint: str
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    tier: str | None = None
    region: str | None = None
    nodes: list[str] = []
    continuations: int = 0
    outcome: str = ""
    status: int = 200
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    placed_s: float | None = None
    first_token_s: float | None = None
    duration_s: float = 0.0
    gateway: str | None = None
    trace_id: str | None = None
    origin: str | None = None
    instance_id: str | None = None
    utilization: float | None = None
    cached_tokens: int | None = None


_COLUMNS = ", ".join(RequestRecord.__struct_fields__)
_FOUND_MAX = 100
"""Requests of one id, which clients choose, that are found at most."""


def write_requests(session: Session, records: Sequence[RequestRecord]) -> None:
    """Add rows without waiting for the server's disk: a server that crashes may lose those of its last second.

    Raises:
        DBAPIError: the rows were not written.
    """
    defer(session, text("SET LOCAL synchronous_commit = off"))
    copy_rows(session, f"request_log ({_COLUMNS})", map(msgspec.structs.astuple, records))


def find_requests(session: Session, request_id: str, *, tenant: str | None = None) -> list[LoggedRequest]:
    """The requests of an id, the newest first; of one tenant's, if that is named."""
    query = select(LoggedRequest).where(LoggedRequest.request_id == request_id)
    if tenant is not None:
        query = query.where(LoggedRequest.tenant == tenant)
    return list(session.scalars(query.order_by(LoggedRequest.number.desc()).limit(_FOUND_MAX)))


def list_requests(
    session: Session,
    *,
    outcome: str | None,
    which: Mapping[str, str | None],
    since_s: float | None,
    after: str | None,
    limit: int,
) -> Page[LoggedRequest]:
    """Requests, the newest first. `outcome` `failed` is every one but `ok` and `cancelled`; `which`: values by column,
    None: any; `since_s`: a Unix time.
    """
    query = select(LoggedRequest).where(*matching(LoggedRequest, which))
    if outcome == "failed":
        query = query.where(LoggedRequest.outcome.not_in((OK, CANCELLED)))
    elif outcome is not None:
        query = query.where(LoggedRequest.outcome == outcome)
    if since_s is not None:
        query = query.where(LoggedRequest.ended_at >= func.to_timestamp(since_s))
    return page(session, query, after=after, limit=limit, newest_first=True)
