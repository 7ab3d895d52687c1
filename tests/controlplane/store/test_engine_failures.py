"""Failures on engines: each is counted once, and forgotten when it is old or the operator chooses anew."""

from typing import Any

import pytest
from sqlalchemy import text

from controlplane.store import fleet
from controlplane.store.engine_failures import engine_failures, note_engine_failure
from controlplane.store.tables import Instance, Model
from tests.controlplane.world import World

MODEL: dict[str, Any] = {
    "name": "tide",
    "path": "/x",
    "architecture": "Llama",
    "weights_bytes": 1,
    "kv_bytes_per_token": 512,
    "context_tokens": 4096,
}


def fail(world: World, name: str, *, error: str = "no such kernel") -> int | None:
    """An instance fails now; how many failures that makes, None if it was counted before."""
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET changed_at = clock_timestamp() WHERE id = :name"), {"name": name})
    return note(world, name, error=error)


def note(world: World, name: str, *, error: str = "no such kernel") -> int | None:
    with world.database.transaction() as session:
        instance = session.get_one(Instance, name)
        instance.engine, instance.error = "vllm", error
        noted = note_engine_failure(session, instance, forget_s=3600)
        return None if noted is None else noted["times"]


def known(world: World) -> dict[str, tuple[int, str]]:
    with world.database.transaction() as session:
        failures = engine_failures(session).get(("tide", "H800"), {})
    return {engine: (failure.times, failure.error) for engine, failure in failures.items()}


def test_each_failure_counts_once_until_it_is_forgotten(world: World) -> None:
    world.join("n1")
    first, second = world.place("n1"), world.place("n1", slot=1)
    assert [fail(world, first), note(world, first), fail(world, second, error="x" * 999), note(world, first)] == [
        1,
        None,
        2,
        None,
    ]
    assert known(world) == {"vllm": (2, ("n1: " + "x" * 999)[:300])}
    with world.database.transaction() as session:
        session.execute(text("UPDATE engine_failures SET failed_at = now() - interval '2 hours'"))
    assert fail(world, first) == 1


@pytest.mark.parametrize(
    ("change", "forgotten"), [({}, False), ({"weights_bytes": 2}, False), ({"engine": "vllm"}, True)]
)
def test_another_engine_by_the_operators_word_is_tried_at_once(
    world: World, change: dict[str, Any], forgotten: bool
) -> None:
    world.join("n1")
    fail(world, world.place("n1"))
    with world.database.transaction() as session:
        fleet.put_model(session, Model(**MODEL | {"engine": "auto"} | change))
    assert (known(world) == {}) == forgotten
