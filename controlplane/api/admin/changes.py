"""Changes with an audit event that holds the row before and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from sqlalchemy.orm import Session

from controlplane.api.credentials import Caller
from controlplane.store.fleet import fleet_index
from controlplane.store.keys import record, snapshot
from controlplane.store.rows import Key
from controlplane.store.tables import Base, Owned


@contextmanager
def fleet_change(
    session: Session, caller: Caller, action: str, table: type[Base], key: Key, *, owner: str | None = None
) -> Iterator[None]:
    """`audited`, under the fleet's lock."""
    fleet_index(session, lock=True)
    with audited(session, caller, action, table, key, owner=owner):
        yield


@contextmanager
def audited(
    session: Session, caller: Caller, action: str, table: type[Base], key: Key, *, owner: str | None = None
) -> Iterator[None]:
    """Record the change that the block makes to the row of this key. What changed nothing is not recorded. `owner`: the
    row's from now on; None: the one that it has.
    """
    present = session.get(table, key)
    before = None if present is None else snapshot(present)
    yield
    session.flush()
    present = session.get(table, key)
    if owner is not None and present is not None:
        cast("Owned", present).owner = owner
        session.flush()
    after = None if present is None else snapshot(present)
    if before != after:
        subject = key if isinstance(key, str) else "|".join(key)
        record(session, actor=caller.name, action=action, subject=subject, before=before, after=after)
