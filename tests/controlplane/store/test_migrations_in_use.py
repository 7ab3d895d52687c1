"""A database is migrated while processes read and write it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, text

import migrations
from controlplane.errors import SchemaError
from tests.controlplane.world import until

BEFORE_OWNERS = "0044"
"""0040, the next, changes regions first and models later."""
HAS_OWNERS = text(
    "SELECT count(*) FROM information_schema.columns WHERE table_name = 'regions' AND column_name = 'owner'"
)
VERSION = text("SELECT version_num FROM alembic_version")
WAITS = text("SELECT count(*) FROM pg_locks WHERE relation = CAST(:table AS regclass) AND NOT granted")
LOCKED_LONG = text(
    "SELECT count(*) FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE datname = current_database()"
    " AND locktype = 'advisory' AND clock_timestamp() - state_change > interval '300ms'"
)
HELD_S = 0.35
"""Longer than half of what a migration waits for its locks, and shorter than the whole."""


def is_waited_for(connection: Connection, table: str) -> bool:
    return bool(connection.execute(WAITS, {"table": table}).scalar_one())


def test_of_a_request_and_a_migration_that_wait_for_each_other_the_migration_gives_way(
    engine: Engine, config: Config, database_url: str
) -> None:
    command.downgrade(config, BEFORE_OWNERS)
    with ThreadPoolExecutor(1) as threads:
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.begin() as request, autocommit.connect() as other:
            request.execute(text("SELECT count(*) FROM models"))
            migrated = threads.submit(migrations.upgrade, database_url)
            until(lambda: is_waited_for(other, "models"))
            assert request.execute(text("SELECT count(*) FROM regions")).scalar_one() == 0
        migrated.result()
    with engine.connect() as connection:
        assert connection.execute(VERSION).scalar_one() == migrations.revisions()[0]


def test_a_migration_that_got_its_locks_one_by_one_gives_way_too(
    engine: Engine, database_url: str, config: Config
) -> None:
    """A request has waited for its first lock for a second, PostgreSQL's time to look for a deadlock, before the
    migration waits for what the request has: were it to wait still, the request would be undone.
    """
    command.downgrade(config, BEFORE_OWNERS)
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    ready = threading.Barrier(3)

    def hold(table: str) -> None:
        with engine.begin() as holder, autocommit.connect() as other:
            holder.execute(text(f"LOCK TABLE {table} IN ACCESS SHARE MODE"))
            ready.wait()
            until(lambda: is_waited_for(other, table))
            holder.execute(text("SELECT pg_sleep(:held_s)"), {"held_s": HELD_S})

    with ThreadPoolExecutor(3) as threads, engine.begin() as request, autocommit.connect() as other:
        held = [threads.submit(hold, table) for table in ("region_latencies", "gpu_types")]
        request.execute(text("SELECT count(*) FROM models"))
        ready.wait()
        migrated = threads.submit(migrations.upgrade, database_url)
        until(lambda: is_waited_for(other, "region_latencies"))
        assert request.execute(text("SELECT count(*) FROM regions")).scalar_one() == 0
        request.commit()
        for each in (*held, migrated):
            each.result()


def test_requests_that_follow_each_other_keep_no_migration_from_its_locks(
    engine: Engine, database_url: str, config: Config
) -> None:
    """There is always one that holds a table of a later migration and waits for one of an earlier."""
    command.downgrade(config, "0036")
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with engine.begin() as request:
                request.execute(text("SELECT count(*), pg_sleep(0.05) FROM models"))
                request.execute(text("SELECT count(*) FROM nodes"))

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask) for _ in range(4)]
        try:
            migrations.upgrade(database_url)
        finally:
            over.set()
        for each in asking:
            each.result()
    with engine.connect() as connection:
        assert connection.execute(VERSION).scalar_one() == migrations.revisions()[0]


def test_a_transaction_that_does_not_end_is_named_and_the_migrations_before_stay(
    engine: Engine, config: Config, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    revisions = migrations.revisions()
    command.downgrade(config, revisions[revisions.index(BEFORE_OWNERS) + 1])
    with engine.begin() as dump:
        dump.execute(text("SELECT count(*) FROM models"))
        with pytest.raises(SchemaError, match=r"within 2 s.*ALTER TABLE models.*pg_dump"):
            migrations.upgrade(database_url, patience_s=2)
    said = [record.getMessage() for record in caplog.records if record.name == migrations.__name__]
    assert ["ALTER TABLE models" in line for line in said] == [True], "once, at the first attempt"
    with engine.connect() as connection:
        assert connection.execute(VERSION).scalar_one() == BEFORE_OWNERS
        assert connection.execute(HAS_OWNERS).scalar_one() == 0
    migrations.upgrade(database_url)
    with engine.connect() as connection:
        assert connection.execute(HAS_OWNERS).scalar_one() == 1


def test_a_server_that_ends_idle_transactions_leaves_the_lock_of_a_migration_alone(
    engine: Engine, config: Config, database_url: str
) -> None:
    """It is held by a transaction that is idle for as long as a migration takes."""
    command.downgrade(config, BEFORE_OWNERS)
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with ThreadPoolExecutor(1) as threads, engine.begin() as request, autocommit.connect() as other:
        request.execute(text("SELECT count(*) FROM models"))
        database = other.execute(text("SELECT quote_ident(current_database())")).scalar_one()
        other.execute(text(f"ALTER DATABASE {database} SET idle_in_transaction_session_timeout = '200ms'"))
        migrated = threads.submit(migrations.upgrade, database_url)
        until(lambda: other.execute(LOCKED_LONG).scalar_one())
        request.commit()
        migrated.result()
        assert other.execute(HAS_OWNERS).scalar_one() == 1


@pytest.mark.parametrize(("before", "table"), [("0050", "batches"), ("0051", "files")])
def test_an_index_is_built_beside_those_who_read(
    engine: Engine, database_url: str, config: Config, before: str, table: str
) -> None:
    """It is there before the old one is dropped, which waits for them."""
    command.downgrade(config, before)
    find = text("SELECT indexdef FROM pg_indexes WHERE indexname = :name")
    with ThreadPoolExecutor(1) as threads, engine.connect() as other:
        looking = other.execution_options(isolation_level="AUTOCOMMIT")
        with engine.begin() as request:
            request.execute(text(f"SELECT count(*) FROM {table}"))
            migrated = threads.submit(migrations.upgrade, database_url)
            until(lambda: looking.execute(find, {"name": f"ix_{table}_tenant_next"}).scalar() is not None)
        migrated.result()
        assert "(tenant, id)" in looking.execute(find, {"name": f"ix_{table}_tenant"}).scalar_one()
        assert looking.execute(find, {"name": f"ix_{table}_tenant_next"}).scalar() is None


def test_the_build_of_an_index_gives_way_to_those_who_write(engine: Engine, database_url: str, config: Config) -> None:
    command.downgrade(config, "0051")
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as request, autocommit.connect() as other:
            request.execute(text("LOCK TABLE files IN ROW EXCLUSIVE MODE"))
            migrated = threads.submit(migrations.upgrade, database_url)
            until(lambda: is_waited_for(other, "files"))
            until(lambda: not is_waited_for(other, "files"))
        migrated.result()
    with engine.connect() as connection:
        assert connection.execute(VERSION).scalar_one() == migrations.revisions()[0]
