"""Usage: requests and tokens by hour, tenant, model and tier. Nothing is counted twice: a process writes its whole
count of an hour in place of the one before, and what is added up is added in the transaction that takes it away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import CheckConstraint, ColumnElement, Index, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.store.tables import Base

_BATCHES = "batches"
COUNTED = ("requests", "failed", "input_tokens", "output_tokens")
DIMENSIONS = ("hour", "day", "month", "tenant", "model", "tier")


class UsageHour(Base):
    """What one process (`writer`) counted of a tenant, a model and a tier in an hour. It writes its whole count again
    and again, so writing it twice changes nothing. `failed`: those of `requests` that did not end well. Rows of old
    hours are added up, under no writer.
    """

    __tablename__ = "usage_hours"
    __table_args__ = (
        CheckConstraint(
            "requests >= failed AND failed >= 0 AND input_tokens >= 0 AND output_tokens >= 0", name="positive"
        ),
        Index("ix_usage_hours_tenant", "tenant", "hour"),
    )
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    writer: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    failed: Mapped[int]
    input_tokens: Mapped[int]
    output_tokens: Mapped[int]


class UsageKey(NamedTuple):
    """What usage is counted of. `hour`: its beginning."""

    hour: datetime
    tenant: str
    model: str
    tier: str


@dataclass(kw_only=True)
class Usage:
    """Requests, those of them that did not end well, and tokens."""

    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, *, failed: bool, input_tokens: int, output_tokens: int) -> None:
        """Count a request."""
        self.requests += 1
        self.failed += failed
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


def put_usage(session: Session, writer: str, counts: Mapping[UsageKey, Usage]) -> None:
    """Write what a process counted from the beginning of each hour on, in place of what it wrote before."""
    if counts:
        added = insert(UsageHour)
        values = {name: added.excluded[name] for name in COUNTED}
        session.execute(added.on_conflict_do_update(constraint="pk_usage_hours", set_=values), _rows(writer, counts))


def add_batch_usage(session: Session, counts: Mapping[UsageKey, Usage]) -> None:
    """Add the usage of a batch, in the transaction that ends it."""
    if counts:
        _add(session, _rows(_BATCHES, counts))


def read_usage(
    session: Session,
    *,
    by: Sequence[str],
    since: datetime,
    until: datetime | None,
    tenant: str | None,
    model: str | None,
    after: int,
    limit: int,
) -> list[dict[str, Any]]:
    """Usage added up by some of DIMENSIONS, the newest first, beginning with row `after`."""
    columns = [_dimension(name).label(name) for name in by]
    sums = [func.sum(getattr(UsageHour, name)).label(name) for name in COUNTED]
    query = select(*columns, *sums).where(UsageHour.hour >= since).group_by(*columns)
    if until is not None:
        query = query.where(UsageHour.hour < until)
    if tenant is not None:
        query = query.where(UsageHour.tenant == tenant)
    if model is not None:
        query = query.where(UsageHour.model == model)
    order = [column.desc() if column.name in {"hour", "day", "month"} else column for column in columns]
    rows = session.execute(query.order_by(*order).offset(after).limit(limit)).mappings()
    return [{name: int(value) if name in COUNTED else value for name, value in row.items()} for row in rows]


def add_up_usage(session: Session, *, older_s: float) -> int:
    """Make one row of those of many processes for hours that ended `older_s` seconds ago; returns how many rows were
    added up. No process writes of an hour that long ago any more.
    """
    old = UsageHour.hour < func.now() - timedelta(seconds=older_s)
    gone = session.execute(delete(UsageHour).where(old, UsageHour.writer != "").returning(UsageHour)).scalars().all()
    whole: dict[UsageKey, Usage] = {}
    for row in gone:
        usage = whole.setdefault(UsageKey(row.hour, row.tenant, row.model, row.tier), Usage())
        for name in COUNTED:
            setattr(usage, name, getattr(usage, name) + getattr(row, name))
    if whole:
        _add(session, _rows("", whole))
    return len(gone)


def _rows(writer: str, counts: Mapping[UsageKey, Usage]) -> list[dict[str, Any]]:
    return [{**key._asdict(), "writer": writer, **vars(usage)} for key, usage in sorted(counts.items())]


def _add(session: Session, rows: list[dict[str, Any]]) -> None:
    added = insert(UsageHour)
    values = {name: getattr(UsageHour, name) + added.excluded[name] for name in COUNTED}
    session.execute(added.on_conflict_do_update(constraint="pk_usage_hours", set_=values), rows)


def _dimension(name: str) -> ColumnElement[Any]:
    if name in {"day", "month"}:
        return func.date_trunc(name, UsageHour.hour)
    column: ColumnElement[Any] = getattr(UsageHour, name)
    return column
