"""A database is migrated while processes read and write it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

import migrations
from controlplane.errors import SchemaError
from tests.controlplane.world import until

BEFORE_OWNERS = "0044"
"""0040, the next, changes regions first and models later."""
HAS_OWNERS = text(
    "SELECT count(*) FROM information_schema.columns WHERE table_name = 'regions' AND column_name = 'owner'"
)
VERSION = text("SELECT version_num FROM alembic_version")
WAITS_FOR_MODELS = text("SELECT count(*) FROM pg_locks WHERE relation = 'models'::regclass AND NOT granted")


def test_of_a_request_and_a_migration_that_wait_for_each_other_the_migration_gives_way(
    engine: Engine, config: Config, database_url: str
) -> None:
    command.downgrade(config, BEFORE_OWNERS)
    with ThreadPoolExecutor(1) as threads:
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.begin() as request, autocommit.connect() as other:
            request.execute(text("SELECT count(*) FROM models"))
            migrated = threads.submit(migrations.upgrade, database_url)
            until(lambda: other.execute(WAITS_FOR_MODELS).scalar_one() == 1)
            assert request.execute(text("SELECT count(*) FROM regions")).scalar_one() == 0
        migrated.result()
    with engine.connect() as connection:
        assert connection.execute(VERSION).scalar_one() == migrations.revisions()[0]


def test_a_transaction_that_does_not_end_is_named_and_nothing_is_changed(
    engine: Engine, config: Config, database_url: str
) -> None:
    command.downgrade(config, BEFORE_OWNERS)
    with engine.begin() as dump:
        dump.execute(text("SELECT count(*) FROM models"))
        with pytest.raises(SchemaError, match=r"within 0 s.*ALTER TABLE models.*pg_dump"):
            migrations.upgrade(database_url, patience_s=0)
    with engine.connect() as connection:
        assert connection.execute(VERSION).scalar_one() == BEFORE_OWNERS
        assert connection.execute(HAS_OWNERS).scalar_one() == 0
    migrations.upgrade(database_url)
    with engine.connect() as connection:
        assert connection.execute(HAS_OWNERS).scalar_one() == 1
