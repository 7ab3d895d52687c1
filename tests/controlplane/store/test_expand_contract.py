"""Two neighbouring releases run on one schema: a migration takes nothing away that the release before still uses.

What is compared are the tables that it leaves, so raw SQL counts as much as Alembic's operations. A migration that
contracts says so in its docstring, one line for each release: `Unused since 0.2.0: nodes.dtype, old_table`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

import migrations

EXPANDS_SINCE = "0037"
"""The schema of the release before this rule."""
_UNUSED = re.compile(r"^Unused since (\d+\.\d+\.\d+): (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Column:
    kind: str
    required: bool
    """a row that does not name the column is refused, or one that sets it to null"""


Schema = Mapping[str, Mapping[str, Column]]


def read_schema(engine: Engine) -> Schema:
    found = inspect(engine)
    return {
        table: {
            each["name"]: Column(
                kind=str(each["type"]),
                required=not each["nullable"] and each["default"] is None and each.get("identity") is None,
            )
            for each in found.get_columns(table)
        }
        for table in found.get_table_names()
    }


def contracted(before: Schema, after: Schema) -> Iterator[str]:
    """What code that was written for `before` misses in `after`: tables, and columns as table.column."""
    for table, columns in before.items():
        if table not in after:
            yield table
            continue
        for name, column in columns.items():
            left = after[table].get(name)
            if left is None or left.kind != column.kind or (left.required and not column.required):
                yield f"{table}.{name}"
        yield from (f"{table}.{name}" for name, new in after[table].items() if name not in columns and new.required)


def said(docstring: str) -> set[str]:
    """What a migration's docstring says that no release uses."""
    return {name.strip(" .") for _, names in _UNUSED.findall(docstring) for name in names.split(",")}


def test_every_migration_leaves_what_the_release_before_uses(engine: Engine, config: Config) -> None:
    command.downgrade(config, EXPANDS_SINCE)
    script = ScriptDirectory.from_config(config)
    later = list(script.iterate_revisions("head", EXPANDS_SINCE))[::-1]
    assert len(later) == migrations.revisions().index(EXPANDS_SINCE)
    before = read_schema(engine)
    for revision in later:
        command.upgrade(config, revision.revision)
        after = read_schema(engine)
        gone = set(contracted(before, after)) - said(revision.module.__doc__ or "")
        assert not gone, (
            f"{revision.revision} takes away what the release before may use: {sorted(gone)}. Add first, and take away"
            " one release after the code stopped using it (CONTRIBUTING.md)"
        )
        before = after


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ("ALTER TABLE nodes ADD COLUMN more int", []),
        ("ALTER TABLE nodes ADD COLUMN more int NOT NULL DEFAULT 0", []),
        ("ALTER TABLE nodes ADD COLUMN more int NOT NULL", ["nodes.more"]),
        ("CREATE TABLE more (id int PRIMARY KEY)", []),
        ("ALTER TABLE nodes DROP COLUMN dtype", ["nodes.dtype"]),
        ("ALTER TABLE nodes RENAME COLUMN dtype TO kind", ["nodes.dtype"]),
        ("UPDATE nodes SET dtype = ''; ALTER TABLE nodes ALTER COLUMN dtype SET NOT NULL", ["nodes.dtype"]),
        ("ALTER TABLE nodes ALTER COLUMN draining DROP DEFAULT", ["nodes.draining"]),
        ("ALTER TABLE nodes ALTER COLUMN generation TYPE smallint", ["nodes.generation"]),
        ("ALTER TABLE idempotency_keys RENAME TO answers", ["idempotency_keys"]),
        ("DROP TABLE idempotency_keys", ["idempotency_keys"]),
    ],
)
def test_what_takes_something_away_is_found(engine: Engine, change: str, gone: list[str]) -> None:
    before = read_schema(engine)
    with engine.begin() as connection:
        connection.execute(text(change))
    assert list(contracted(before, read_schema(engine))) == gone


def test_a_migration_says_what_no_release_uses() -> None:
    doc = "Plans keep less.\n\nUnused since 0.2.0: plans.old, old_plans\nUnused since 0.3.0: nodes.dtype.\n"
    assert said(doc) == {"plans.old", "old_plans", "nodes.dtype"}
    assert said("Unused since long ago: plans.old") == set()
