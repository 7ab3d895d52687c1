"""The NIW queue on real Postgres: no request to two, nothing written by an older claim, one result a request."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError

from controlplane.policies.lifecycle import BatchRequestState
from controlplane.store import queue
from controlplane.store.batch_tables import BatchResult, QueuedRequest
from controlplane.store.batches import cancel_batch, counts_of, end_batch_requests
from controlplane.store.endpoint_summary import backlogs
from controlplane.store.queue import Claim, Outcome
from tests.controlplane.world import MODEL, World, claim_waiting


def claim(world: World, count: int = 1, lease_s: int = 60) -> list[Claim]:
    """Up to `count` requests of each batch."""
    with world.database.transaction() as session:
        return claim_waiting(session, count, lease_s=lease_s)


def finish(world: World, *held: Claim, status_code: int = 200) -> int:
    outcomes = [Outcome(claim=each, status_code=status_code, body={"ok": True}, upstream_id="u") for each in held]
    with world.database.transaction() as session:
        return sum(queue.finish(session, outcomes).values())


def give_back(world: World, *held: Claim, delay_s: float = 0, tried: bool = True) -> int:
    with world.database.transaction() as session:
        return queue.give_back(session, *held, delay_s=delay_s, error="no", tried=tried)


def expire_leases(world: World, attempts_max: int = 5) -> int:
    with world.database.transaction() as session:
        return queue.expire_leases(session, attempts_max=attempts_max, count_max=1000)


def run(world: World, statement: str) -> None:
    with world.database.transaction() as session:
        session.execute(text(statement))


def open_rows(world: World) -> list[tuple[int, bool, int, int]]:
    """(line, is leased, epoch, attempts)"""
    with world.database.transaction() as session:
        rows = session.scalars(select(QueuedRequest).order_by(QueuedRequest.batch_number, QueuedRequest.line))
        return [(row.line, row.lease_until is not None, row.epoch, row.attempts) for row in rows]


def results(world: World) -> Sequence[Any]:
    with world.database.transaction() as session:
        return session.scalars(select(BatchResult).order_by(BatchResult.batch_number, BatchResult.line)).all()


def test_a_claim_has_all_that_is_needed(world: World) -> None:
    batch_id = world.add_batch(lines=2, tenant="acme")
    [held] = claim(world)
    assert (held.batch_id, held.line, held.endpoint, held.fence) == (batch_id, 1, "/v1/completions", f"{batch_id}/1")
    assert (held.model, json.loads(held.body)["prompt"], held.epoch, held.attempts) == (MODEL, "line 1", 1, 1)
    assert open_rows(world) == [(1, True, 1, 1), (2, False, 0, 0)]


def test_threads_never_share_a_request(world: World) -> None:
    world.add_batch(lines=60)
    world.add_batch(lines=60)
    taken: list[tuple[int, int]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        while claimed := claim(world, count=3):
            assert len(claimed) <= 6
            taken.extend(held.key for held in claimed)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 120


def test_a_row_that_another_is_about_to_take_is_skipped_not_waited_for(world: World) -> None:
    world.add_batch(lines=2)
    with world.database.transaction() as session:
        [group] = queue.batch_groups(session)
        [mine] = queue.claim(session, {(group.batch, group.model): 1}, lease_s=60)
        [theirs] = claim(world, count=5)
    assert (mine.line, theirs.line) == (1, 2)


def test_groups_are_what_waits_by_batch_and_model_the_nearest_deadline_first(world: World) -> None:
    late = world.add_batch(lines=3, window_s=7200, tenant="b")
    soon = world.add_batch(lines=1, window_s=60, tenant="a")
    world.add_batch()  # not validated
    with world.database.transaction() as session:
        first, second = queue.batch_groups(session)
    assert (first.batch, first.tenant, first.model, first.waiting) == (world.batch(soon).number, "a", MODEL, 1)
    assert (second.batch, second.tenant, second.waiting) == (world.batch(late).number, "b", 3)
    assert 0 < first.left_s <= 60 < second.left_s <= 7200
    assert first.age_s >= 0
    claim(world, count=2)
    with world.database.transaction() as session:
        [left] = queue.batch_groups(session)
    assert (left.batch, left.waiting, left.left) == (second.batch, 1, 3)


def test_a_look_has_a_limit_and_one_tenants_many_batches_hide_no_other(world: World) -> None:
    """Of tenant a the two nearest deadlines do not wait any more: all their lines are leased."""
    many = [world.add_batch(lines=1, window_s=60 + number, tenant="a") for number in range(6)]
    late = world.add_batch(lines=1, window_s=7200, tenant="b")
    numbers = {batch_id: world.batch(batch_id).number for batch_id in (*many, late)}
    with world.database.transaction() as session:
        groups = queue.batch_groups(session, groups_max=2)
        assert [group.batch for group in groups] == [numbers[many[0]], numbers[late]]
        queue.claim(session, {(numbers[batch_id], MODEL): 1 for batch_id in many[:2]}, lease_s=60)
        groups = queue.batch_groups(session, groups_max=3)
    assert [group.batch for group in groups] == [numbers[many[2]], numbers[many[3]], numbers[late]]


def test_a_look_counts_as_many_as_its_caller_may_take(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add_batch(lines=40, window_s=60)
    world.add_batch(lines=40, window_s=7200)
    with world.database.transaction() as session:
        assert [group.waiting for group in queue.batch_groups(session)] == [16, 16]
        assert [group.waiting for group in queue.batch_groups(session, waiting_max=1)] == [1, 1]
        assert [group.waiting for group in queue.batch_groups(session, waiting_max=30)] == [30, 30]
        assert [group.waiting for group in queue.batch_groups(session, waiting_max=300)] == [40, 40]
        monkeypatch.setattr(queue, "_COUNTED_ALL", 70)
        assert [group.waiting for group in queue.batch_groups(session, waiting_max=300)] == [35, 35]
        assert [group.waiting for group in queue.batch_groups(session, waiting_max=300, groups_max=1)] == [40]


def test_the_size_of_a_groups_requests_is_the_mean_of_those_that_completed(world: World) -> None:
    world.add_batch(lines=6)
    run(world, "UPDATE queued_requests SET model = 'other' WHERE line > 3")
    run(world, "INSERT INTO batch_models SELECT batch_number, 'other', 3, 1 FROM batch_models")
    by_line = {held.line: held for held in claim(world, count=2)}
    sizes = {1: (100, 20), 2: (10, 10), 4: (1000, 1)}
    ended = [
        Outcome(claim=by_line[line], status_code=200, body={}, input_tokens=of[0], output_tokens=of[1])
        for line, of in sizes.items()
    ]
    with world.database.transaction() as session:
        assert [group.tokens for group in queue.batch_groups(session)] == [None, None]
        prompts = {group.model: group.input_tokens for group in queue.batch_groups(session)}
        assert prompts == {MODEL: 2.0, "other": pytest.approx(1 / 3)}
        queue.finish(session, ended)
        queue.finish(session, [Outcome(claim=by_line[5], error={"code": "no"})])
        assert {group.model: group.tokens for group in queue.batch_groups(session)} == {MODEL: 70.0, "other": 1001.0}
        assert {group.model: group.left for group in queue.batch_groups(session)} == {MODEL: 4, "other": 1}


@pytest.mark.parametrize("loss", ["expired", "taken by another", "finished", "cancelled"])
def test_nothing_is_written_by_a_claim_that_is_over(world: World, loss: str) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    if loss == "finished":
        assert finish(world, held) == 1
    elif loss == "cancelled":
        run(world, "DELETE FROM queued_requests")
    else:
        run(world, "UPDATE queued_requests SET lease_until = now() - interval '1 s'")
        assert expire_leases(world) == 1
        assert expire_leases(world) == 0
    if loss == "taken by another":
        run(world, "UPDATE queued_requests SET not_before = NULL")
        [other] = claim(world)
        assert (other.epoch, other.attempts) == (3, 2)
    before, made = open_rows(world), len(results(world))
    assert finish(world, held) == 0
    assert not give_back(world, held)
    with world.database.transaction() as session:
        kept = queue.renew(session, [held], lease_s=3600)
    assert kept == set(), "no result of it would be written"
    assert (open_rows(world), len(results(world))) == (before, made)


def test_a_request_that_waits_again_is_not_ours_to_finish(world: World) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    assert give_back(world, held)
    assert finish(world, held) == 0
    assert open_rows(world) == [(1, False, 2, 1)]


def test_of_many_results_each_is_written_once_and_the_late_ones_are_not(world: World) -> None:
    world.add_batch(lines=3)
    first, second, third = claim(world, count=3)
    assert finish(world, second) == 1
    assert finish(world, third, second, first) == 2
    assert [result.line for result in results(world)] == [1, 2, 3]
    assert open_rows(world) == []


def test_a_result_that_is_an_error_alone(world: World) -> None:
    """No response and no name of one: by itself, and among others."""
    batch_id = world.add_batch(lines=3)
    first, second, third = claim(world, count=3)
    gave_up = [Outcome(claim=each, error={"code": "no", "message": f"line {each.line}\n"}) for each in (first, second)]
    with world.database.transaction() as session:
        assert queue.finish(session, gave_up[:1]) == {first.key: True}
    answered = Outcome(claim=third, status_code=200, body={"n": 3}, upstream_id="u", input_tokens=7)
    with world.database.transaction() as session:
        assert queue.finish(session, [gave_up[1], answered]) == {second.key: True, third.key: True}
    found = [(each.line, each.state, each.status_code, each.body, each.error, each.upstream_id, each.input_tokens)
             for each in results(world)]  # fmt: skip
    assert found == [
        (1, "failed", None, None, {"code": "no", "message": "line 1\n"}, "", 0),
        (2, "failed", None, None, {"code": "no", "message": "line 2\n"}, "", 0),
        (3, "completed", 200, {"n": 3}, None, "u", 7),
    ]
    with world.database.transaction() as session:  # SQL's null, not JSON's
        nulls = "SELECT count(*) FROM batch_results WHERE body IS NULL AND status_code IS NULL AND error IS NOT NULL"
        assert session.scalar(text(nulls)) == 2
    assert world.batch(batch_id).ended_at is None


def test_one_result_a_request_is_a_constraint(world: World) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    assert finish(world, held, status_code=400) == 1
    [result] = results(world)
    assert (result.state, result.status_code, result.body) == ("failed", 400, {"ok": True})
    number, line = held.key
    again = BatchResult(batch_number=number, line=line, state="completed", upstream_id="again")
    with pytest.raises(IntegrityError), world.database.transaction() as session:
        session.add(again)
    with pytest.raises(IntegrityError):
        run(world, "UPDATE batch_results SET state = 'running'")


def test_giving_back_waits_and_counts_only_real_attempts(world: World) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    assert give_back(world, held, tried=False)
    [held] = claim(world)
    assert (held.epoch, held.attempts) == (3, 1)
    assert give_back(world, held, delay_s=60)
    assert open_rows(world) == [(1, False, 4, 1)]
    assert claim(world) == []
    with world.database.transaction() as session:
        assert queue.batch_groups(session) == ()
    run(world, "UPDATE queued_requests SET not_before = now() - interval '1 ms'")
    assert claim(world)[0].attempts == 2


def test_many_are_given_back_at_once_but_for_those_that_are_not_ours_any_more(world: World) -> None:
    ended, other = world.batch(world.add_batch(lines=1)), world.batch(world.add_batch(lines=3))
    held = claim(world, count=3)
    run(world, f"UPDATE queued_requests SET epoch = 2 WHERE batch_number = {other.number} AND line = 2")
    with world.database.transaction() as ending:
        end_batch_requests(ending, ended.number, state=BatchRequestState.CANCELLED)
        assert give_back(world, *held, tried=False) == 2
    assert open_rows(world) == [(1, False, 2, 0), (2, True, 2, 1), (3, False, 2, 0)]
    assert give_back(world, *held) == 0


def test_renewing(world: World) -> None:
    world.add_batch(lines=3)
    held = claim(world, count=3, lease_s=5)
    assert finish(world, held[0]) == 1
    with world.database.transaction() as session:
        assert queue.renew(session, held, lease_s=3600) == {held[1].key, held[2].key}
    with world.database.transaction() as session:
        left_s = session.scalar(text("SELECT extract(epoch FROM min(lease_until) - now()) FROM queued_requests"))
    assert left_s > 3000


def test_renewing_waits_for_nobody(world: World) -> None:
    """A result is being written: the row is locked, and its claim is kept until that has committed."""
    world.add_batch(lines=2)
    held = claim(world, count=2)
    with world.database.transaction() as writing:
        queue.finish(writing, [Outcome(claim=held[0], status_code=200, body={})])
        with world.database.transaction() as session:
            session.execute(text("SET LOCAL lock_timeout = '5s'"))
            assert queue.renew(session, held, lease_s=60) == {each.key for each in held}


def test_a_request_that_ends_its_dispatchers_ends_itself(world: World) -> None:
    """Lost leases count, up to a limit; then the error line says so. The others of those dispatchers go on."""
    world.add_batch(lines=2)
    for _ in range(3):
        run(world, "UPDATE queued_requests SET not_before = NULL")
        held = claim(world, count=2)
        give_back(world, held[1], tried=False)
        run(world, "UPDATE queued_requests SET lease_until = now() - interval '1 s' WHERE lease_until IS NOT NULL")
        assert expire_leases(world, attempts_max=3) == 1
    assert open_rows(world) == [(2, False, 6, 0)]
    [poison] = results(world)
    assert (poison.line, poison.state, poison.status_code) == (1, "failed", None)
    assert poison.error["code"] == "attempts_exhausted"


def test_requests_past_their_deadline_end_with_a_line(world: World) -> None:
    batch_id, other = world.add_batch(lines=3), world.add_batch(lines=1)
    running, done, theirs = claim(world, count=2)
    assert finish(world, done) == 1
    run(world, f"UPDATE batches SET deadline_at = now() - interval '1 s' WHERE id = '{batch_id}'")
    with world.database.transaction() as session:
        [number] = queue.overdue_batches(session)
        assert queue.expire_requests(session, number) == 2
        assert queue.expire_requests(session, number) == 0
    assert [result.state for result in results(world)] == ["expired", "completed", "expired"]
    assert results(world)[0].error["code"] == "batch_expired"
    assert (results(world)[0].status_code, theirs.batch_id) == (None, other)
    assert finish(world, running) == 0
    assert world.batch(batch_id).state == "in_progress", "finalizing is the dispatcher's"


def test_cancelling_and_finishing_at_once_wait_for_no_one_for_ever(world: World) -> None:
    """Both end many requests of one batch, in any order: one waits for the other, and neither is broken off."""
    batch_id = world.add_batch(lines=200)
    held = claim(world, count=100)
    start, failures = threading.Barrier(3), list[Exception]()

    def work(do: Any) -> None:
        start.wait()
        try:
            do()
        except Exception as error:
            failures.append(error)

    def cancel() -> None:
        with world.database.transaction() as session:
            cancel_batch(session, batch_id, tenant="acme")

    jobs = [lambda: finish(world, *held[:50]), lambda: finish(world, *reversed(held[50:])), cancel]
    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert open_rows(world) == []
    ended = Counter(result.state == "completed" for result in results(world))
    with world.database.transaction() as session:
        counts = counts_of(session, [world.batch(batch_id)])[batch_id]
    assert (counts.completed, counts.failed) == (ended[True], ended[False])
    assert ended.total() == 200


def test_who_writes_results_waits_for_no_one_who_ends_a_batch(world: World) -> None:
    """The results of other batches are written meanwhile, and it is known afterwards whether there is one to write."""
    ended_id, kept_id, other_id = (world.add_batch(lines=1) for _ in range(3))
    held = {each.batch_id: each for each in claim(world)}
    outcomes = [Outcome(claim=each, status_code=200, body={}) for each in held.values()]
    with contextlib.suppress(ZeroDivisionError), world.database.transaction() as session:
        end_batch_requests(session, world.batch(kept_id).number, state=BatchRequestState.CANCELLED)
        with world.database.transaction() as ending:
            end_batch_requests(ending, world.batch(ended_id).number, state=BatchRequestState.CANCELLED)
            with world.database.statement() as writing:
                assert queue.finish(writing, outcomes) == {held[other_id].key: True}
        raise ZeroDivisionError
    with world.database.statement() as writing:
        assert queue.finish(writing, outcomes) == {
            held[ended_id].key: False,
            held[kept_id].key: True,
            held[other_id].key: False,
        }
    states = {result.batch_number: result.state for result in results(world)}
    assert states == {
        world.batch(ended_id).number: "cancelled",
        world.batch(kept_id).number: "completed",
        world.batch(other_id).number: "completed",
    }


def test_backlogs(world: World) -> None:
    world.add_model("other")
    world.add_batch(lines=4, window_s=600)
    claim(world, count=2)
    with world.database.transaction() as session:
        [(model, backlog)] = backlogs(session).items()
        now_s = session.scalar(select(func.extract("epoch", func.now())))
    assert model == MODEL
    assert backlog.tokens > 0
    assert float(now_s) < backlog.due_s <= float(now_s) + 600  # type: ignore[arg-type]
    with world.database.transaction() as session:
        assert backlogs(session, count_max=3) == {MODEL: backlog}, "two wait"
        for count_max in (1, 2):
            bounded = backlogs(session, count_max=count_max)[MODEL]
            assert (bounded.tokens, bounded.at_least) == (backlog.tokens * count_max / 2, True)
    claim(world, count=2)
    with world.database.transaction() as session:
        assert backlogs(session) == {}


def test_leases_expire_some_at_a_time(world: World) -> None:
    world.add_batch(lines=3)
    assert len(claim(world, 3)) == 3
    run(world, "UPDATE queued_requests SET lease_until = now() - interval '1 s'")
    with world.database.transaction() as session:
        assert queue.expire_leases(session, attempts_max=5, count_max=2) == 2
    assert expire_leases(world) == 1
    assert expire_leases(world) == 0
