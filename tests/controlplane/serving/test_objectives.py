"""Counting how objectives were kept: gateways add up, and nothing is lost while Postgres is away."""

import time

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from controlplane.serving.objectives import ObjectiveCounter
from controlplane.store.objectives import (
    ALL_MODELS,
    BUCKET_S,
    Kept,
    ObjectiveCount,
    ObjectiveKey,
    add_objectives,
    forget_objectives,
    read_kept,
    read_objectives,
)
from controlplane.store.session import Database
from tests.controlplane.serving.test_usage import CommitLostDatabase

NOW_S = int(time.time()) // BUCKET_S * BUCKET_S
KEPT = Kept(answers=1, kept=1, tokens=3, tokens_in_time=3)
LATE = Kept(answers=1, kept=0, tokens=4, tokens_in_time=1)


def add(database: Database, counts: dict[tuple[str, int, str, str], Kept]) -> None:
    with database.transaction() as session:
        add_objectives(session, {ObjectiveKey(*key): kept for key, kept in counts.items()})


def series(database: Database, *, since_s: int = 0, **which: str | None) -> list[tuple[int, str, Kept]]:
    with database.transaction() as session:
        return read_objectives(session, **({"model": None, "region": None} | which), since_s=since_s)


def test_counts_are_kept_while_postgres_is_away(database: Database) -> None:
    away = CommitLostDatabase(database, commits=False)
    counter = ObjectiveCounter(away)  # type: ignore[arg-type]
    counter.count("m", "east", "IW-F", KEPT)
    for _ in range(2):
        with pytest.raises(OperationalError):
            counter.flush()
        counter.count("m", "east", "IW-F", LATE)
    away.loses = False
    for _ in range(2):
        counter.flush()
    counts = [kept for _, _, kept in series(database, model="m")]
    assert sum(kept.answers for kept in counts) == 3
    assert sum(kept.kept for kept in counts) == 1
    assert sum(kept.tokens for kept in counts) == 11


def test_gateways_models_and_regions_add_up(database: Database) -> None:
    for _ in range(2):
        add(
            database,
            {
                ("a", NOW_S, "east", "IW-F"): KEPT,
                ("b", NOW_S, "east", "IW-F"): LATE,
                ("b", NOW_S, "west", "IW-N"): KEPT,
                ("b", NOW_S - 2 * BUCKET_S, "west", "IW-N"): LATE,
            },
        )
    with database.transaction() as session:
        rows = read_kept(session, since_s=NOW_S - 86_400, now_since_s=NOW_S - BUCKET_S)
    assert [tuple(row) for row in rows] == [("east", "IW-F", 4, 2, 4, 2), ("west", "IW-N", 4, 2, 2, 2)]
    late = Kept(answers=2, kept=0, tokens=8, tokens_in_time=2)
    kept = Kept(answers=2, kept=2, tokens=6, tokens_in_time=6)
    assert series(database, model="b", region="west") == [(NOW_S - 2 * BUCKET_S, "IW-N", late), (NOW_S, "IW-N", kept)]
    assert series(database, model="b", region="west", since_s=NOW_S) == [(NOW_S, "IW-N", kept)]
    assert [kept.answers for _, _, kept in series(database, region="east")] == [4]


def test_old_counts_go(database: Database) -> None:
    add(database, {("a", start_s, "east", "IW-F"): KEPT for start_s in (0, BUCKET_S, NOW_S)})
    with database.transaction() as session:
        assert forget_objectives(session, before_s=NOW_S, count_max=3) == 3
        assert forget_objectives(session, before_s=NOW_S, count_max=3) == 1
        left = session.execute(select(ObjectiveCount.model, ObjectiveCount.start_s).order_by(ObjectiveCount.model))
        assert [tuple(row) for row in left] == [(ALL_MODELS, NOW_S), ("a", NOW_S)]
