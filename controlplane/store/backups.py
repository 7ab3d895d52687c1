"""What a backup needs of the database, and what a restore asks of it."""

from dataclasses import dataclass

from alembic.runtime.migration import MigrationContext
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from controlplane.errors import SchemaError
from controlplane.store.batch_tables import File

_MOMENT = """
SELECT pg_export_snapshot() AS name, to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS made_at,
  current_setting('server_version_num')::int / 10000 AS postgres,
  (SELECT system_identifier::text FROM pg_control_system()) AS system_identifier
"""
_OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'tidepool%'
"""
_TABLES = (
    "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm')"
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment of the database, which others may share by its name while the transaction is open. `postgres`: major
    version of the server; `files`: ids of the files that are there.
    """

    name: str
    made_at: str
    postgres: int
    system_identifier: str
    schema: str
    files: tuple[str, ...]


def take_snapshot(session: Session) -> Snapshot:
    """The moment of this transaction, which must not have asked anything yet.

    Raises:
        SchemaError: the database was never migrated.
    """
    session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
    session.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
    moment = session.execute(text(_MOMENT)).mappings().one()
    schema = MigrationContext.configure(session.connection()).get_current_revision()
    if schema is None:
        raise SchemaError("the database has no schema: there is nothing to back up")
    files = session.scalars(select(File.id).where(File.deleted_at.is_(None)).order_by(File.id))
    return Snapshot(**moment, schema=schema, files=tuple(files))


@dataclass(frozen=True, kw_only=True)
class Target:
    """A database that a backup is to be restored into. `others`: connections of Tidepool's processes."""

    postgres: int
    tables: int
    others: int


def read_target(session: Session) -> Target:
    """What is in the way of a restore."""
    major = session.scalar(select(func.current_setting("server_version_num")))
    return Target(
        postgres=int(major or 0) // 10_000,
        tables=session.execute(text(_TABLES)).scalar_one(),
        others=session.execute(text(_OTHERS)).scalar_one(),
    )


def empty_database(session: Session) -> None:
    """Drop everything of Tidepool's."""
    session.execute(text("DROP SCHEMA public CASCADE"))
    session.execute(text("CREATE SCHEMA public"))
