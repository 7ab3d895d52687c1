"""Rows of batches: cancelling at every state, counts, all or nothing, and the order of results."""

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, NotFoundError
from controlplane.policies.lifecycle import BatchState
from controlplane.store import queue
from controlplane.store.batch_attempts import Due, begin_attempt
from controlplane.store.batch_tables import Batch, BatchCount, BatchModel, BatchRequest, BatchResult, QueuedRequest
from controlplane.store.batches import (
    BatchCounts,
    NewRequest,
    add_requests,
    cancel_batch,
    counts_of,
    forget_requests,
    move_batch,
    result_lines,
)
from controlplane.store.queue import Claim, Outcome
from tests.controlplane.world import World, claim_waiting, request_line

S = BatchState
PATHS = {
    S.VALIDATING: [],
    S.FAILED: [S.FAILED],
    S.IN_PROGRESS: [S.IN_PROGRESS],
    S.FINALIZING: [S.IN_PROGRESS, S.FINALIZING],
    S.COMPLETED: [S.IN_PROGRESS, S.FINALIZING, S.COMPLETED],
    S.EXPIRED: [S.IN_PROGRESS, S.EXPIRED],
    S.CANCELLING: [S.CANCELLING],
    S.CANCELLED: [S.CANCELLING, S.CANCELLED],
}


def finish(session: Session, held: Claim, status_code: int = 200) -> None:
    outcome = Outcome(claim=held, status_code=status_code, body={}, upstream_id="u", input_tokens=7, output_tokens=3)
    assert queue.finish(session, [outcome]) == {held.key: True}


def test_cancelling_at_every_state(world: World) -> None:
    after = {
        S.VALIDATING: S.CANCELLING,
        S.IN_PROGRESS: S.CANCELLING,
        S.CANCELLING: S.CANCELLING,
        S.CANCELLED: S.CANCELLED,
    }
    assert set(PATHS) == set(BatchState)
    for state, path in PATHS.items():
        batch_id = world.add_batch()
        with world.database.transaction() as session:
            for step in path:
                move_batch(session, session.get_one(Batch, batch_id), step)
        with world.database.transaction() as session:
            if state in after:
                assert cancel_batch(session, batch_id, tenant="acme").state == after[state]
            else:
                with pytest.raises(ConflictError):
                    cancel_batch(session, batch_id, tenant="acme")
        assert world.batch(batch_id).state == after.get(state, state)


def test_a_batch_is_cancelled_for_as_long_as_it_has_requests(world: World) -> None:
    batch_id = world.add_batch(lines=1)
    with world.database.transaction() as session:
        assert session.scalar(text("SHOW statement_timeout")) == "10s"
        cancel_batch(session, batch_id, tenant="acme")
        assert session.scalar(text("SHOW statement_timeout")) == "0"


def test_cancelling_ends_what_waits_and_what_runs(world: World) -> None:
    batch_id = world.add_batch(lines=4)
    with world.database.transaction() as session:
        done, _running = claim_waiting(session, 2)
        finish(session, done)
        assert begin_attempt(session, Due.END) is None
        with pytest.raises(NotFoundError):
            cancel_batch(session, batch_id, tenant="other")
        cancel_batch(session, batch_id, tenant="acme")
        finished = begin_attempt(session, Due.END)
        assert finished is not None
        assert counts_of(session, [finished])[batch_id] == BatchCounts(
            total=4, completed=1, failed=3, input_tokens=7, output_tokens=3
        )
        lines = list(result_lines(session, finished))
    assert [(custom_id, line.state) for custom_id, line in lines] == [
        ("c1", "completed"),
        ("c2", "cancelled"),
        ("c3", "cancelled"),
        ("c4", "cancelled"),
    ]
    error = lines[1][1].error
    assert error is not None
    assert error["code"] == "batch_cancelled"


def test_counts(world: World) -> None:
    batch_id, empty = world.add_batch(lines=5), world.add_batch()
    with world.database.transaction() as session:
        held = claim_waiting(session, 3)
        finish(session, held[0])
        finish(session, held[1], status_code=400)
        rows = [session.get_one(Batch, batch_id), session.get_one(Batch, empty)]
        assert counts_of(session, rows) == {
            batch_id: BatchCounts(total=5, completed=1, failed=1, input_tokens=14, output_tokens=6),
            empty: BatchCounts(),
        }
        assert counts_of(session, []) == {}


def test_the_counts_of_an_ended_batch_are_its_last_ones(world: World) -> None:
    batch_id = world.add_batch(lines=2)
    with world.database.transaction() as session:
        for held in claim_waiting(session, 2):
            finish(session, held)
        batch = session.get_one(Batch, batch_id)
        batch.completed, batch.input_tokens = 2, 14
        forget_requests(session, batch)
        move_batch(session, batch, BatchState.FINALIZING)
        move_batch(session, batch, BatchState.COMPLETED)
        assert counts_of(session, [batch])[batch_id] == BatchCounts(total=2, completed=2, input_tokens=14)
        for table in (BatchCount, BatchRequest, BatchResult, QueuedRequest):
            assert session.scalar(select(func.count()).select_from(table)) == 0, "the files hold them"
        assert list(session.scalars(select(BatchModel.model))) == ["tide"]


def test_a_batch_that_ends_while_it_is_looked_at_keeps_its_counts(world: World) -> None:
    batch_id = world.add_batch(lines=1)
    with world.database.transaction() as reader:
        seen = reader.get_one(Batch, batch_id)
        with world.database.transaction() as session:
            [held] = claim_waiting(session, 1)
            finish(session, held)
            batch = session.get_one(Batch, batch_id)
            batch.completed = 1
            forget_requests(session, batch)
            move_batch(session, batch, BatchState.FINALIZING)
            move_batch(session, batch, BatchState.COMPLETED)
        assert counts_of(reader, [seen])[batch_id] == BatchCounts(total=1, completed=1)


def test_all_lines_or_none(world: World) -> None:
    batch_id = world.add_batch()

    def lines() -> list[NewRequest]:
        return [request_line(1), request_line(2), request_line(1)]

    with pytest.raises(Exception, match="pk_batch_requests"), world.database.transaction() as session:
        add_requests(session, session.get_one(Batch, batch_id), lines())
    with world.database.transaction() as session:
        assert session.scalar(select(func.count()).select_from(BatchRequest)) == 0


def test_results_come_in_the_order_of_the_lines(world: World) -> None:
    batch_id = world.add_batch(lines=1200)
    with world.database.transaction() as session:
        for held in reversed(claim_waiting(session, 1200)):
            finish(session, held)
        batch = session.get_one(Batch, batch_id)
        assert [custom_id for custom_id, _ in result_lines(session, batch)] == [f"c{n}" for n in range(1, 1201)]


def test_moves_that_do_not_exist(world: World) -> None:
    batch_id = world.add_batch()
    with pytest.raises(ValueError, match="cannot become completed"), world.database.transaction() as session:
        move_batch(session, session.get_one(Batch, batch_id), BatchState.COMPLETED)
