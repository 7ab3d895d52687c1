"""Ending a batch survives a crash at every step."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO, Any

import msgspec
import pytest
from sqlalchemy import select, text

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.errors import ConflictError
from controlplane.policies.lifecycle import BatchRequestState
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import cancel_batch, end_batch_requests, forget_requests, result_lines
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.files import get_file
from controlplane.store.queue import Outcome, claim, finish, give_back
from controlplane.store.usage import UsageHour
from tests.controlplane.world import MODEL, World, claim_waiting


class CrashError(BaseException):
    """The process ends here."""


def step(world: World, blobs: BlobStore, *, crash: bool = False) -> str | None:
    """One try. `crash`: the process ends before the step is committed."""

    def take(*args: Any) -> Callable[[], None]:
        end = FINALIZE.take(*args)
        if crash:
            raise CrashError
        return end

    return world.step(replace(FINALIZE, take=take), blobs)


def answer_all(world: World) -> None:
    with world.database.transaction() as session:
        held = claim_waiting(session)
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
        assert step(world, blobs) is None, "the next try waits a moment"
        world.no_delay()
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
    with world.database.transaction() as session:
        [row] = session.scalars(select(UsageHour))
        assert (row.tenant, row.model, row.tier, row.requests, row.failed) == ("acme", MODEL, "NIW", 3, 0)
        assert (row.input_tokens, row.output_tokens) == (21, 9), "counted once, crashes or not"


def test_a_batch_that_cannot_be_finalized_blocks_no_other_and_fails_in_the_end(world: World, blobs: BlobStore) -> None:
    bad, good = world.add_batch(lines=2), world.add_batch(lines=2)
    answer_all(world)
    with world.database.transaction() as session:
        session.execute(text("DELETE FROM batch_results WHERE line = 2 AND batch_number = 1"))
    assert [step(world, blobs) for _ in range(5)] == [bad, bad, good, good, None]
    assert (world.batch(good).state, world.batch(bad).state) == ("completed", "finalizing")
    for _ in range(world.settings.batch_attempts_max - 1):
        assert world.batch(bad).ended_at is None
        world.no_delay()
        assert step(world, blobs) == bad
    batch = world.batch(bad)
    assert (batch.state, batch.ended_at is None) == ("failed", False)
    [error] = errors_of(batch)
    assert error["code"] == "attempts_exhausted"
    assert "the batch could not be finalized: an internal error (RuntimeError)" in error["message"]
    with world.database.transaction() as session:
        assert len(list(result_lines(session, batch))) == 1, "what it has is kept"


def test_a_cancelled_batch_that_cannot_be_finalized_is_cancelled(world: World, blobs: BlobStore) -> None:
    batch_id = world.add_batch(lines=2)
    with world.database.transaction() as session:
        cancel_batch(session, batch_id, tenant="acme")
        session.execute(text("DELETE FROM batch_results WHERE line = 2"))
    for _ in range(world.settings.batch_attempts_max):
        world.no_delay()
        assert step(world, blobs) == batch_id
    batch = world.batch(batch_id)
    assert (batch.state, [error["code"] for error in errors_of(batch)]) == ("cancelled", ["attempts_exhausted"])


@pytest.mark.parametrize("hostile", ["a\0b", "\x7f\x1b[31m", "\ufffe\u202e", "x" * 100_000])
def test_whatever_a_node_says_its_batch_ends(world: World, blobs: BlobStore, hostile: str) -> None:
    batch_id = world.add_batch(lines=3)
    with world.database.transaction() as session:
        first, second, third = claim(session, {(1, "tide"): 3}, lease_s=60)
        outcomes = [
            Outcome(claim=first, status_code=200, body={hostile: hostile, "big": 2**63 - 1}),
            Outcome(claim=second, error={"code": "attempts_exhausted", "message": hostile}),
        ]
        assert len(finish(session, outcomes)) == 2
        assert give_back(session, third, delay_s=0, error=hostile, tried=True)
        assert end_batch_requests(session, 1, state=BatchRequestState.EXPIRED) == 1
    assert [step(world, blobs) for _ in range(3)] == [batch_id, batch_id, None]
    batch = world.batch(batch_id)
    assert (batch.state, batch.completed, batch.failed) == ("expired", 1, 2)
    with blobs.open(str(batch.output_file_id)) as stream:
        assert msgspec.json.decode(stream.read())["response"]["body"] == {hostile: hostile, "big": 2**63 - 1}
    with blobs.open(str(batch.error_file_id)) as stream:
        first_error = msgspec.json.decode(stream.readline())["error"]
    assert first_error["message"] == hostile.replace("\0", "\ufffd")


def test_deleting_many_results_may_take_long(world: World) -> None:
    batch_id = world.add_batch(lines=2)
    with world.database.transaction() as session:
        forget_requests(session, session.get_one(Batch, batch_id))
        assert session.scalar(text("SHOW statement_timeout")) == "0"


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
    batch_id = world.add_batch(lines=1)
    answer_all(world)

    def take(*args: Any) -> Callable[[], None]:
        end = FINALIZE.take(*args)
        world.no_delay()
        assert step(world, blobs) is None, "another one leaves it alone"
        return end

    assert world.step(replace(FINALIZE, take=take), blobs) == batch_id


@pytest.mark.parametrize("state", ["cancelling", "finalizing"])
def test_a_client_that_cancels_waits_for_no_file(world: World, blobs: BlobStore, state: str) -> None:
    """Also where the batch is at its end."""
    batch_id = world.add_batch(lines=1)
    answers = []

    def cancel() -> None:
        with world.database.transaction() as session:
            try:
                answers.append(cancel_batch(session, batch_id, tenant="acme").state)
            except ConflictError as error:
                answers.append(error.message)

    if state == "finalizing":
        answer_all(world)
        assert step(world, blobs) == batch_id
    else:
        cancel()

    class Slow(FolderBlobs):
        @contextlib.contextmanager
        def writing(self, file_id: str) -> Iterator[IO[bytes]]:
            with super().writing(file_id) as stream:
                yield stream
                cancel()

    assert world.settings.home is not None
    assert step(world, Slow(world.settings.home / "files")) == batch_id
    ended, answer = (
        ("completed", "Cannot cancel a batch with status 'finalizing'.")
        if state == "finalizing"
        else ("cancelled", "cancelling")
    )
    assert (world.batch(batch_id).state, set(answers)) == (ended, {answer})


def errors_of(batch: Batch) -> list[Any]:
    assert batch.errors is not None
    data: list[Any] = batch.errors["data"]
    return data
