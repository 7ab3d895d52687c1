"""Ending a batch survives a crash at every step."""

import msgspec
import pytest
from sqlalchemy import text

from controlplane.dispatcher.aside import Aside
from controlplane.dispatcher.finalize import finalize_one
from controlplane.store.blobs import BlobStore
from controlplane.store.files import get_file
from controlplane.store.queue import Outcome, claim, finish, waiting_lots
from tests.controlplane.world import World


class CrashError(Exception):
    pass


def step(world: World, blobs: BlobStore, aside: Aside | None = None, *, crash: bool = False) -> str | None:
    with world.database.transaction() as session:
        moved = finalize_one(session, blobs, world.settings, aside or Aside())
        if crash:
            raise CrashError
        return moved


def answer_all(world: World) -> None:
    with world.database.transaction() as session:
        wanted = {(lot.batch, lot.model): 10 for lot in waiting_lots(session)}
        held = claim(session, wanted, lease_s=60)
        outcomes = [
            Outcome(claim=each, status_code=200, body={"n": each.line}, input_tokens=7, output_tokens=3)
            for each in held
        ]
        assert len(finish(session, outcomes)) == len(held)


def test_a_crash_at_either_step_loses_nothing(world: World, blobs: BlobStore) -> None:
    batch_id = world.add_batch(lines=3)
    assert step(world, blobs) is None, "its requests are still open"
    answer_all(world)
    for state in ("finalizing", "completed"):
        with pytest.raises(CrashError):
            step(world, blobs, crash=True)
        assert world.batch(batch_id).output_file_id is None
        assert step(world, blobs) == batch_id
        assert world.batch(batch_id).state == state
    assert step(world, blobs) is None
    batch = world.batch(batch_id)
    with world.database.transaction() as session:
        file = get_file(session, str(batch.output_file_id), tenant="acme")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch_id}_output.jsonl")
    with blobs.open(file.id) as stream:
        content = stream.read()
    assert len(content) == file.bytes
    lines = [msgspec.json.decode(line) for line in content.splitlines()]
    assert [(line["custom_id"], line["response"]["body"]["n"]) for line in lines] == [("c1", 1), ("c2", 2), ("c3", 3)]
    assert (batch.total, batch.completed, batch.failed) == (3, 3, 0)
    assert (batch.input_tokens, batch.output_tokens) == (21, 9)


def test_a_batch_that_cannot_be_finalized_blocks_no_other(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = world.add_batch(lines=2), world.add_batch(lines=2)
    answer_all(world)
    with world.database.transaction() as session:
        session.execute(text("DELETE FROM batch_results WHERE line = 2 AND batch_number = 1"))
    aside = Aside()
    assert step(world, blobs, aside) == bad, "it says finalizing"
    with pytest.raises(RuntimeError, match=f"{bad} has 1 results for 2 lines"):
        step(world, blobs, aside)
    assert [step(world, blobs, aside) for _ in range(3)] == [good, good, None]
    assert (world.batch(good).state, world.batch(bad).state) == ("completed", "finalizing")
    monkeypatch.setattr("controlplane.dispatcher.aside._ASIDE_S", 0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            step(world, blobs)


def test_counts_begin_at_nought(world: World, blobs: BlobStore) -> None:
    """Whatever the row said before its end."""
    batch_id = world.add_batch(lines=2)
    answer_all(world)
    with world.database.transaction() as session:
        session.execute(text("UPDATE batches SET completed = 1, failed = 1, input_tokens = 5, output_tokens = 5"))
    assert [step(world, blobs) for _ in range(2)] == [batch_id] * 2
    batch = world.batch(batch_id)
    assert (batch.completed, batch.failed, batch.input_tokens, batch.output_tokens) == (2, 0, 14, 6)


def test_two_dispatchers_finalize_it_once(world: World, blobs: BlobStore) -> None:
    world.add_batch(lines=1)
    answer_all(world)
    with world.database.transaction() as one, world.database.transaction() as other:
        assert finalize_one(one, blobs, world.settings, Aside()) is not None
        assert finalize_one(other, blobs, world.settings, Aside()) is None
