"""Rows of any table: one by its key, a page in the order of keys, writing many, and deleting old ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar, cast

import psycopg
from sqlalchemy import (
    Column,
    ColumnElement,
    Integer,
    Select,
    any_,
    delete,
    func,
    inspect,
    literal_column,
    select,
    tuple_,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute, Session

from controlplane.errors import InvalidValueError, NotFoundError
from controlplane.store.session import is_lost
from controlplane.store.tables import Base

PAGE_MAX = 100
_INT64_MAX = 2**63 - 1
Row = TypeVar("Row", bound=Base)
Key = str | tuple[str, str]


def require(session: Session, table: type[Row], key: Key, *, param: str) -> Row:
    """The row of that key.

    Raises:
        NotFoundError: there is none; it names `param`.
    """
    row = session.get(table, key)
    if row is None:
        name = key if isinstance(key, str) else " in ".join(key)
        missing = "does not exist" if param.endswith("_id") else "is not registered"
        raise NotFoundError(f"{param.removesuffix('_id')} '{name}' {missing}", param=param)
    return row


@dataclass(frozen=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows, and the cursor of the page that follows; None: there is none."""

    rows: list[Row]
    next: str | None

    @property
    def has_more(self) -> bool:
        return self.next is not None


def page(
    session: Session, query: Select[Row], *, after: str | int | None, limit: int, newest_first: bool = False
) -> Page[Row]:
    """The rows of `query` in the order of their primary key that follow the cursor `after`: a key, or the names of a
    longer key with bars between them.

    Raises:
        InvalidValueError: `after` is no such cursor.
    """
    assert 1 <= limit <= PAGE_MAX
    columns = inspect(query.column_descriptions[0]["entity"]).primary_key
    key: ColumnElement[Any] = columns[0] if len(columns) == 1 else tuple_(*columns)
    if after is not None:
        start = _start(after, columns)
        query = query.where(key < start if newest_first else key > start)
    rows = list(session.scalars(query.order_by(key.desc() if newest_first else key).limit(limit + 1)))
    last = [str(getattr(rows[limit - 1], column.key)) for column in columns] if len(rows) > limit else None
    return Page(rows=rows[:limit], next=None if last is None else "|".join(last))


def list_rows(
    session: Session,
    table: type[Row],
    *,
    which: Mapping[str, Any] | None = None,
    after: str | None,
    limit: int,
) -> Page[Row]:
    """One page of the rows of a table. `which`: values by column; None: any."""
    return page(session, select(table).where(*matching(table, which or {})), after=after, limit=limit)


def delete_some(
    session: Session, table: type[Base], *old: ColumnElement[bool], order: InstrumentedAttribute[Any], count_max: int
) -> int:
    """Delete at most `count_max` rows of those that are `old`, the first by `order`; returns how many. Rows that
    somebody else has locked wait for the next time.
    """
    place: ColumnElement[str] = literal_column(f"{table.__tablename__}.ctid")
    rows = select(place).select_from(table).where(*old).order_by(order)
    some = rows.limit(count_max).with_for_update(skip_locked=True).scalar_subquery()
    # as an array: Postgres goes to these rows one by one, and never compares the whole table with them
    deleted = delete(table).where(place == any_(func.array(some))).returning(place)
    return len(session.execute(deleted, execution_options={"synchronize_session": False}).all())


def delete_older(session: Session, *, column: InstrumentedAttribute[datetime], keep_s: float, count_max: int) -> int:
    """`delete_some` of the rows whose time in `column` is more than `keep_s` seconds ago."""
    old = column < func.now() - timedelta(seconds=keep_s)
    return delete_some(session, cast("type[Base]", column.class_), old, order=column, count_max=count_max)


def copy_rows(session: Session, into: str, rows: Iterable[Sequence[Any]]) -> int:
    """Write rows by COPY into a table, `name` or `name (columns)`; returns how many. The caller raises the timeout of
    statements where rows arrive slowly.

    Raises:
        DBAPIError: the copy failed; it bypasses SQLAlchemy, but its errors are raised as SQLAlchemy's.
    """
    count = 0
    try:
        with session.connection().connection.cursor().copy(f"COPY {into} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
                count += 1
    except psycopg.Error as error:
        if lost := is_lost(error):
            session.connection().invalidate(error)
        raise DBAPIError.instance("COPY", None, error, psycopg.Error, connection_invalidated=lost) from error
    return count


def matching(table: type[Row], values: Mapping[str, Any]) -> list[ColumnElement[bool]]:
    """Conditions that columns have these values; None: any."""
    return [getattr(table, name) == value for name, value in values.items() if value is not None]


def _start(cursor: str | int, columns: Sequence[Column[Any]]) -> Any:
    """The key that a cursor names, in the type of its columns."""
    if isinstance(cursor, int):
        return cursor
    names = cursor.split("|", len(columns) - 1) if len(columns) > 1 else [cursor]
    is_number = isinstance(columns[0].type, Integer)
    known = len(names) == len(columns)
    if is_number:
        known = cursor.isascii() and cursor.isdigit() and int(cursor) <= _INT64_MAX
    if not known:
        raise InvalidValueError(f"after: '{cursor}' is no cursor of this list", param="after")
    return int(cursor) if is_number else names[0] if len(names) == 1 else tuple(names)
