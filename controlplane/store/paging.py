"""Cursor pagination: rows after a key, one more than asked for to know whether there is more."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from controlplane.store.tables import Base

PAGE_MAX = 100
Row = TypeVar("Row", bound=Base)


@dataclass(frozen=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows, and whether more follow."""

    rows: list[Row]
    has_more: bool


def page(
    session: Session,
    query: Select[Row],
    key: InstrumentedAttribute[Any] | ColumnElement[Any],
    *,
    after: Any,
    limit: int,
    newest_first: bool = False,
) -> Page[Row]:
    """The rows of `query` ordered by `key` (a column, or a tuple of columns) that come after `after`."""
    assert 1 <= limit <= PAGE_MAX
    if after is not None:
        query = query.where(key < after if newest_first else key > after)
    rows = list(session.scalars(query.order_by(key.desc() if newest_first else key).limit(limit + 1)))
    return Page(rows=rows[:limit], has_more=len(rows) > limit)
