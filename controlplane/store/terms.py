"""The term: a number that rises whenever another server becomes the primary, by promotion or from a backup.

Nothing has to tell: a promotion begins a new timeline, and a restored dump lies on a server of another identifier.
Whoever first finds that the server is not the one of the stored term raises it: by as many as its timeline is newer, so
that a cluster that was taken back to a moment goes above the terms of every promotion since.
"""

import os
import socket

import structlog
from sqlalchemy import BigInteger, CheckConstraint, func, select, text, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.store.events import Event
from controlplane.store.session import defer
from controlplane.store.tables import Base

log = structlog.get_logger()
_TERM_MAX = 2**62


class Term(Base):
    """The one row: the server that was the primary when `term` began. `reported`: the newest term that nodes have seen,
    which is newer where this primary was replaced, or restored from an old backup.
    """

    __tablename__ = "terms"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    system_identifier: Mapped[int] = mapped_column(BigInteger)
    timeline: Mapped[int] = mapped_column(BigInteger)
    term: Mapped[int] = mapped_column(BigInteger)
    reported: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))


_HERE = text(
    """
    SELECT system_identifier, timeline, terms.term
    FROM (
        SELECT system_identifier,
               CAST(CAST('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8) AS bit(32)) AS bigint) AS timeline
        FROM pg_control_system()
    ) AS server
    LEFT JOIN terms USING (system_identifier, timeline)
    """
)
_RAISE = text(
    """
    INSERT INTO terms (id, system_identifier, timeline, term) VALUES (1, :system_identifier, :timeline, 1)
    ON CONFLICT (id) DO UPDATE
    SET system_identifier = excluded.system_identifier, timeline = excluded.timeline, term = terms.term + CASE
        WHEN terms.system_identifier = excluded.system_identifier THEN greatest(1, excluded.timeline - terms.timeline)
        ELSE 1
    END
    WHERE (terms.system_identifier, terms.timeline) <> (excluded.system_identifier, excluded.timeline)
    RETURNING term
    """
)

_KEPT_WORDS = "Tidepool: before it was emptied, the newest term was"
_KEPT = text("SELECT substring(obj_description(to_regnamespace('public'), 'pg_namespace') FROM :pattern)").bindparams(
    pattern=f"^{_KEPT_WORDS} ([0-9]{{1,19}})$"
)


def current_term(session: Session) -> int:
    """The term of the primary that the session is connected to, raised if that is another server than before.

    A raise commits as the database's own setting has it, whatever the transaction asked for: a term that was lost with
    its primary would be given to the next primary again.
    """
    here = session.execute(_HERE).one()
    if here.term is not None:
        return int(here.term)
    defer(session, text("SET LOCAL synchronous_commit TO DEFAULT"))
    server = {"system_identifier": here.system_identifier, "timeline": here.timeline}
    if (raised := session.scalar(_RAISE, server)) is not None:
        if raised > 1:  # the first one begins with the database
            _note_begin(session, int(raised), f"timeline {here.timeline} of server {here.system_identifier}")
        return int(raised)
    return int(session.execute(_HERE).one().term)  # another transaction raised it meanwhile


def read_term(session: Session) -> Term | None:
    """The stored term, which may be that of the primary before; None: nobody has asked for it yet."""
    return session.get(Term, 1)


def note_reported(session: Session, reported: int) -> None:
    """Keep that a node has seen this term, if it is newer than what other nodes have."""
    if reported < _TERM_MAX:
        session.execute(update(Term).where(Term.reported < reported).values(reported=reported))


def raise_term(session: Session, *, why: str, above: int = 0) -> int:
    """Begin a term that is newer than any that this database has heard of, and than `above`."""
    current_term(session)
    newest = func.greatest(Term.term, Term.reported, above)
    raised = session.scalars(update(Term).values(term=newest + 1).returning(Term.term)).one()
    _note_begin(session, raised, why)
    return raised


def newest_known(session: Session) -> int:
    """The newest term that this database has heard of, or had heard of before it was emptied; 0 in one of an older
    version, or without any.
    """
    kept = int(session.scalar(_KEPT) or 0)
    if session.scalar(select(func.to_regclass("terms"))) is None:
        return kept
    columns = "greatest(term, (to_jsonb(terms) ->> 'reported')::bigint)"  # a column that older versions do not have
    return max(kept, int(session.scalar(text(f"SELECT {columns} FROM terms")) or 0))  # noqa: S608 - of constants


def keep_newest(session: Session, term: int) -> None:
    """Keep the newest term of a database that is emptied, where `newest_known` finds it: a restore that is cut off
    after that, and run again, must still go above it. It stands in the comment on the schema, which a restore leaves.
    """
    session.execute(text(f"COMMENT ON SCHEMA public IS '{_KEPT_WORDS} {term:d}'"))


def _note_begin(session: Session, term: int, why: str) -> None:
    finder = f"{socket.gethostname()}:{os.getpid()}"
    log.info("a term of the primary begins", term=term, why=why)
    session.add(Event(kind="term", what="began", subject=str(term), message=f"{why}; written by {finder}"))
