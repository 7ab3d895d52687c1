"""The migrations make the schema that the code has, and go down and up again on a database with rows."""

import pkgutil
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, Engine, Table, func, inspect, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql import sqltypes

import migrations
from controlplane import store
from controlplane.store.tables import Base

for module in pkgutil.iter_modules(store.__path__):  # whichever of them has tables
    import_module(f"{store.__name__}.{module.name}")
TABLES = Base.metadata.sorted_tables
CHOICES = {
    ("plans", "state"): "applied",
    ("plans", "origin"): "schedule",
    ("files", "purpose"): "batch",
    ("batches", "state"): "validating",
    ("batch_results", "state"): "completed",
    ("models", "engine"): "vllm",
    ("models", "task"): "generate",
    ("responses", "state"): "completed",
    ("instances", "desired"): "spot",
    ("instances", "observed"): "pending",
    ("instances", "kind"): "mixed",
    ("instances", "engine"): "vllm",
    ("instances", "came_from"): "torch",
    ("engine_failures", "engine"): "vllm",
    ("spot_leases", "end_reason"): "returned",
    ("rollouts", "state"): "done",
    ("demand_buckets", "kind"): "IW",
    ("demand_spans", "until_s"): 2,
    ("api_keys", "role"): "node",
    ("events", "kind"): "node",
    ("console_sessions", "source"): "oidc",
    ("console_sessions", "role"): "viewer",
    ("what_if_runs", "state"): "queued",
    ("what_if_runs", "progress"): 0.5,
}


def value_of(column: Column[Any]) -> Any:
    """A value that every constraint likes; foreign keys agree because all text is the same."""
    if (choice := CHOICES.get((column.table.name, column.name))) is not None:
        return choice
    kinds: list[tuple[type[Any] | tuple[type[Any], ...], Any]] = [
        ((JSONB, sqltypes.JSON), {"k": "v"}),
        (sqltypes.Boolean, False),
        (sqltypes.Integer, 600 if column.name == "start_s" else 1),
        (sqltypes.Float, 1.5),
        (sqltypes.DateTime, datetime(2026, 1, 1, tzinfo=UTC)),
        (sqltypes.LargeBinary, b"x"),
        (sqltypes.String, "x"),
        (sqltypes.ARRAY, ["x"]),
    ]
    return next(value for kind, value in kinds if isinstance(column.type, kind))


def fill(connection: Connection) -> None:
    """One row in every table, every column set."""
    for table in TABLES:
        if table.name != "fleet":
            columns = [c for c in table.columns if c.identity is None]
            connection.execute(table.insert().values({c.name: value_of(c) for c in columns}))


FILLED = {table.name: 4 if table.name == "events" else 1 for table in TABLES}
"""An instance, a node and a plan have an event each by themselves."""


def counts(connection: Connection) -> dict[str, int]:
    def count(table: Table) -> int:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()

    return {table.name: count(table) for table in TABLES}


def test_the_migrations_make_what_the_code_says(config: Config) -> None:
    command.check(config)


def test_alembic_knows_every_table() -> None:
    """It compares only what `migrations/env.py` imports."""
    source = (Path(migrations.__file__).parent / "env.py").read_text()
    modules = {mapper.class_.__module__.rpartition(".")[2] for mapper in Base.registry.mappers}
    assert {name for name in modules if f"{name}," not in source} == set()


def test_there_is_one_head(config: Config) -> None:
    assert len(ScriptDirectory.from_config(config).get_heads()) == 1


def test_down_and_up_again_with_a_row_in_every_table(engine: Engine, config: Config, database_url: str) -> None:
    with engine.begin() as connection:
        fill(connection)
        assert counts(connection) == FILLED
    migrations.upgrade(database_url)
    with engine.begin() as connection:
        assert counts(connection) == FILLED, "upgrading again changes nothing"
    command.downgrade(config, "base")
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    migrations.upgrade(database_url)
    with engine.begin() as connection:
        assert counts(connection) == {table.name: int(table.name == "fleet") for table in TABLES}
        fill(connection)
    command.check(config)


def test_going_down_writes_the_zeros_that_took_no_rows(engine: Engine, config: Config) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO demand_minutes VALUES (0), (60), (180), (240)"))
        connection.execute(text("INSERT INTO demand_spans VALUES ('m', 'r', 60, 240)"))
        connection.execute(text("INSERT INTO demand_buckets VALUES ('m', 'r', 'IW', 60, 5.0)"))
    command.downgrade(config, "0024")
    with engine.begin() as connection:
        rows = connection.execute(text("SELECT start_s, tokens_per_s FROM demand_buckets ORDER BY start_s")).all()
    assert [tuple(row) for row in rows] == [(60, 5.0), (180, 0.0)]
