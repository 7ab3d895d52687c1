"""Servers for the whole session, started when first asked for. Under pytest-xdist each worker has its own."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

# The same examples in every run; `HYPOTHESIS_PROFILE=searching` looks further. Neither judges a loaded machine's speed.
settings.register_profile("reproducible", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("searching", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "reproducible"))


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SQLAlchemy's address of an empty database; TIDEPOOL_TEST_DATABASE_URL if that is set."""
    if url := os.environ.get("TIDEPOOL_TEST_DATABASE_URL"):
        yield url
        return
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), free_port(), fsync=False)
    server.prepare()
    with Supervisor([server.child()]):
        yield server.url()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an empty Redis; TIDEPOOL_TEST_REDIS_URL if that is set."""
    if url := os.environ.get("TIDEPOOL_TEST_REDIS_URL"):
        yield url
        return
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"), free_port())
    server.prepare()
    with Supervisor([server.child()]):
        yield server.url()
