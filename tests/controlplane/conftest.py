"""A migrated database, a flushed Redis and settings for every test of the control plane."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import structlog
from pydantic import SecretStr

from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.open import open_blobs
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from tests.controlplane.databases import Databases
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import World

REDIS_DATABASE = 9


@pytest.fixture(autouse=True, scope="session")
def plain_tracebacks() -> None:
    """structlog's default draws every local variable of every frame, which takes minutes, and on standard output."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    factory = structlog.PrintLoggerFactory(file=sys.__stderr__)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer], logger_factory=factory)


@pytest.fixture(scope="session")
def databases(postgres_url: str) -> Iterator[Databases]:
    """Migrated databases of this session's server."""
    databases = Databases(postgres_url)
    yield databases
    databases.close()


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """Address of a migrated, empty database of this test alone."""
    url = databases.take()
    yield url
    databases.give_back(url)


@pytest.fixture
def settings(database_url: str, redis_url: str, tmp_path: Path) -> Settings:
    """Settings that point at this test's database, an empty Redis and a home folder of its own."""
    address = f"{redis_url.rsplit('/', 1)[0]}/{REDIS_DATABASE}"
    flushed = redis.Redis.from_url(address)
    flushed.flushdb()
    flushed.close()
    return Settings(
        database_url=SecretStr(database_url), redis_url=SecretStr(address), home=tmp_path, node_keys_unbound=True
    )


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """The test's database."""
    database = Database(make_engine(settings))
    yield database
    database.close()


@pytest.fixture
def live(settings: Settings) -> Iterator[LiveStore]:
    """The test's Redis."""
    live = LiveStore(settings)
    yield live
    live.close()


@pytest.fixture
def redis_client(settings: Settings) -> Iterator[redis.Redis]:
    """A client of our own for the test's Redis."""
    with redis.Redis.from_url(settings.redis_url.get_secret_value(), decode_responses=True) as client:
        yield client


@pytest.fixture
def redis_clock(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisClock]:
    """The time of the limits, stopped."""
    clock = RedisClock(settings, monkeypatch)
    yield clock
    clock.close()


@pytest.fixture
def blobs(settings: Settings) -> BlobStore:
    """The folder of files that the API and the dispatcher share."""
    return open_blobs(settings)


@pytest.fixture
def an_hour_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day of this process, other than that of its servers."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)


@pytest.fixture
def world(database: Database, live: LiveStore, settings: Settings) -> World:
    """A small fleet without nodes."""
    return World(database, live, settings)
