"""The term: a number that rises whenever another server becomes the primary, by promotion or from a backup.

Nothing has to tell: a promotion begins a new timeline, and a restored dump lies on a server of another identifier.
Whoever first finds that the server is not the one of the stored term raises it.
"""

import structlog
from sqlalchemy import BigInteger, CheckConstraint, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.store.tables import Base

log = structlog.get_logger()


class Term(Base):
    """The one row: the server that was the primary when `term` began."""

    __tablename__ = "terms"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    system_identifier: Mapped[int] = mapped_column(BigInteger)
    timeline: Mapped[int] = mapped_column(BigInteger)
    term: Mapped[int] = mapped_column(BigInteger)


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
    SET system_identifier = excluded.system_identifier, timeline = excluded.timeline, term = terms.term + 1
    WHERE (terms.system_identifier, terms.timeline) <> (excluded.system_identifier, excluded.timeline)
    RETURNING term
    """
)


def current_term(session: Session) -> int:
    """The term of the primary that the session is connected to, raised if that is another server than before.

    A raise commits as the database's own setting has it, whatever the transaction asked for: a term that was lost with
    its primary would be given to the next primary again.
    """
    here = session.execute(_HERE).one()
    if here.term is not None:
        return int(here.term)
    session.execute(text("SET LOCAL synchronous_commit TO DEFAULT"))
    server = {"system_identifier": here.system_identifier, "timeline": here.timeline}
    if (raised := session.scalar(_RAISE, server)) is not None:
        log.info("a term of the primary begins", term=raised)
        return int(raised)
    return int(session.execute(_HERE).one().term)  # another transaction raised it meanwhile
