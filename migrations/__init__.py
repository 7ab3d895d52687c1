"""Alembic migrations of the Postgres schema."""

import functools
import logging
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg.errors import DeadlockDetected, LockNotAvailable
from sqlalchemy.exc import OperationalError

from controlplane.errors import SchemaError

log = logging.getLogger(__name__)
"""Of the standard library: where nobody configured logs, its warnings go to standard error, never into an answer."""
PATIENCE_S = 120.0
"""For how long an upgrade tries to get its locks from running processes, by default."""
_PAUSE_S = 0.5


def config_for(url: str) -> Config:
    """Alembic's configuration for a database."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def upgrade(url: str, revision: str = "head", patience_s: float = PATIENCE_S) -> None:
    """Bring a database to a revision. Running it twice, or twice at once, is harmless.

    Processes may go on meanwhile: where one holds a lock that a migration needs for longer than `migrations/env.py`
    waits, that migration is rolled back and begun again, until `patience_s` are over.

    Raises:
        SchemaError: some transaction kept its locks for all that time. The migrations before this one are done.
    """
    give_up_s, blocked = time.monotonic() + patience_s, None
    while True:
        try:
            return command.upgrade(config_for(url), revision)
        except OperationalError as error:
            if not isinstance(error.orig, LockNotAvailable | DeadlockDetected):
                raise
            if time.monotonic() >= give_up_s:
                raise SchemaError(
                    f"the schema could not be changed within {patience_s:g} s: other connections hold locks"
                    f" ({error.orig}: {error.statement}). End long transactions, such as a pg_dump (they are in"
                    " pg_stat_activity), and migrate again, which goes on from the last migration that was made"
                ) from error
            if error.statement != blocked:  # a line for each statement that waits, not for each attempt
                blocked = error.statement
                log.warning("a migration gives way to other connections and begins again: %s", blocked)
        time.sleep(_PAUSE_S)


@functools.cache
def revisions() -> tuple[str, ...]:
    """The revisions that this version knows, the newest first."""
    script = ScriptDirectory(str(Path(__file__).parent))
    return tuple(revision.revision for revision in script.walk_revisions())
