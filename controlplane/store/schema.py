"""Whether the database has the schema that this version was written for."""

from collections.abc import Sequence

import structlog
from alembic.runtime.migration import MigrationContext
from sqlalchemy.exc import SQLAlchemyError

import migrations
from controlplane.errors import SchemaError
from controlplane.settings import Settings
from controlplane.store.session import Database, make_engine

log = structlog.get_logger()


def check_schema(database: Database) -> None:
    """See that the database is migrated. A newer one than this version knows is served, with a line in the log:
    migrations only add.

    Raises:
        SchemaError: it is older, or was never migrated; the message says what to run.
        SQLAlchemyError: the database does not answer.
    """
    known = migrations.revisions()
    with database.transaction() as session:
        found = MigrationContext.configure(session.connection()).get_current_revision()
    if (fault := too_old(found, known)) is not None:
        raise SchemaError(fault)
    if found not in known:
        log.warning("the database has a newer schema than this version", schema=found, version_needs=known[0])


def check_schema_at_start(settings: Settings) -> None:
    """`check_schema` for a process that starts. One that starts while the database is away goes on without an answer.

    Raises:
        SchemaError: as `check_schema`.
    """
    database = Database(make_engine(settings))
    try:
        check_schema(database)
    except SQLAlchemyError as error:
        log.warning("the database does not answer, so its schema is not known", error=str(error).splitlines()[0])
    finally:
        database.close()


def too_old(found: str | None, known: Sequence[str]) -> str | None:
    """What is wrong with a schema of the revision `found`; None: it is the newest of `known`, or newer than all."""
    if found is None:
        return f"the database has no schema, this version needs {known[0]}: run `tidepool migrate`"
    if found in known[1:]:
        return f"the database has schema {found}, this version needs {known[0]}: run `tidepool migrate`"
    return None
