"""The test's database as migrations see it."""

from collections.abc import Iterator

import pytest
from alembic.config import Config
from sqlalchemy import Engine, create_engine, pool

import migrations


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url, poolclass=pool.NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def config(database_url: str) -> Config:
    return migrations.config_for(database_url)
