"""Alembic migrations of the Postgres schema."""

import functools
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory


def config_for(url: str) -> Config:
    """Alembic's configuration for a database."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Bring a database to a revision. Running it twice, or twice at once, is harmless."""
    command.upgrade(config_for(url), revision)


@functools.cache
def revisions() -> tuple[str, ...]:
    """The revisions that this version knows, the newest first."""
    script = ScriptDirectory(str(Path(__file__).parent))
    return tuple(revision.revision for revision in script.walk_revisions())
