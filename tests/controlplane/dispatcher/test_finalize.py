"""Ending a batch survives a crash at every step."""

import msgspec
import pytest

from controlplane.dispatcher.finalize import finalize_one
from controlplane.store.blobs import BlobStore
from controlplane.store.files import get_file
from controlplane.store.queue import Outcome, claim, finish, waiting_lots
from tests.controlplane.world import World


class CrashError(Exception):
    pass


def step(world: World, blobs: BlobStore, *, crash: bool = False) -> str | None:
    with world.database.transaction() as session:
        moved = finalize_one(session, blobs, world.settings)
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


def test_two_dispatchers_finalize_it_once(world: World, blobs: BlobStore) -> None:
    world.add_batch(lines=1)
    answer_all(world)
    with world.database.transaction() as one, world.database.transaction() as other:
        assert finalize_one(one, blobs, world.settings) is not None
        assert finalize_one(other, blobs, world.settings) is None
