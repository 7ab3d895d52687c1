"""Changes with an audit event that holds the row before and after; those of the fleet are under the fleet's lock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from controlplane.api.credentials import Caller
from controlplane.store.fleet import find, fleet_index
from controlplane.store.keys import record, snapshot
from controlplane.store.tables import Base, Json

Row = TypeVar("Row", bound=Base)


def put_row(
    session: Session,
    caller: Caller,
    *,
    table: type[Row],
    key: str | tuple[str, str],
    action: str,
    values: dict[str, Any],
    write: Callable[[], Row],
) -> Row:
    """Write a row with `write` and record it as `action`. A row that holds `values` already is left alone, so that
    saying the same again makes no plan stale.
    """
    fleet_index(session, lock=True)
    present = find(session, table, key)
    before = None if present is None else snapshot(present)
    if present is not None and all(getattr(present, name) == value for name, value in values.items()):
        return present
    row = write()
    session.flush()
    subject = key if isinstance(key, str) else "|".join(key)
    record(session, actor=caller.name, action=action, subject=subject, before=before, after=snapshot(row))
    return row


@contextmanager
def audited(
    session: Session, caller: Caller, *, action: str, subject: str, find: Callable[[], Base | None]
) -> Iterator[None]:
    """Around a change of one row, which `find` finds: an audit event with the row before and after it. What changed
    nothing is not recorded.
    """
    before = _seen(find())
    yield
    session.flush()
    after = _seen(find())
    if before != after:
        record(session, actor=caller.name, action=action, subject=subject, before=before, after=after)


def _seen(row: Base | None) -> Json | None:
    return None if row is None else snapshot(row)
