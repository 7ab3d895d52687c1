"""The NIW queue on real Postgres: no request to two, nothing written without a lease, one result a request."""

import threading
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError

from controlplane.store import queue
from controlplane.store.batch_tables import BatchRequest, BatchResult
from controlplane.store.queue import Claim
from tests.controlplane.world import MODEL, World


def claim(world: World, count: int = 1, lease_s: int = 60) -> list[Claim]:
    with world.database.transaction() as session:
        return queue.claim(session, model=MODEL, count=count, lease_s=lease_s)


def finish(world: World, held: Claim, status_code: int = 200) -> bool:
    with world.database.transaction() as session:
        return queue.finish(session, held, status_code=status_code, body={"ok": True}, upstream_id="u")


def give_back(world: World, held: Claim, *, delay_s: float = 0, tried: bool = True) -> bool:
    with world.database.transaction() as session:
        return queue.give_back(session, held, delay_s=delay_s, error="no", tried=tried)


def run(world: World, statement: str) -> None:
    with world.database.transaction() as session:
        session.execute(text(statement))


def rows(world: World) -> list[Any]:
    with world.database.transaction() as session:
        return [(r.state, r.attempts) for r in session.scalars(select(BatchRequest).order_by(BatchRequest.id))]


def results(world: World) -> int:
    with world.database.transaction() as session:
        return session.scalar(select(func.count()).select_from(BatchResult)) or 0


def test_a_claim_has_all_that_is_needed(world: World) -> None:
    batch_id = world.add_batch(lines=2, tenant="acme")
    [held] = claim(world)
    assert (held.batch_id, held.tenant, held.endpoint, held.custom_id) == (batch_id, "acme", "/v1/completions", "c1")
    assert (held.model, held.body["prompt"], held.attempts) == (MODEL, "line 1", 1)
    assert rows(world) == [("running", 1), ("waiting", 0)]


def test_threads_never_share_a_request(world: World) -> None:
    world.add_batch(lines=120)
    taken: list[int] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        while claimed := claim(world, count=3):
            assert len(claimed) <= 3
            taken.extend(held.request_id for held in claimed)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 120


def test_a_row_that_another_is_about_to_take_is_skipped_not_waited_for(world: World) -> None:
    world.add_batch(lines=2)
    with world.database.transaction() as session:
        [mine] = queue.claim(session, model=MODEL, count=1, lease_s=60)
        [theirs] = claim(world, count=5)
    assert (mine.custom_id, theirs.custom_id) == ("c1", "c2")


def test_the_nearest_deadline_is_first(world: World) -> None:
    late = world.add_batch(lines=1, window_s=7200)
    soon = world.add_batch(lines=1, window_s=60)
    assert [held.batch_id for held in (*claim(world), *claim(world))] == [soon, late]


@pytest.mark.parametrize("loss", ["expired", "taken by another", "finished", "cancelled"])
def test_nothing_is_written_without_the_lease(world: World, loss: str) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    if loss == "finished":
        assert finish(world, held)
    elif loss == "cancelled":
        run(world, "UPDATE batch_requests SET state = 'cancelled', lease_id = NULL")
    else:
        run(world, "UPDATE batch_requests SET lease_until = now() - interval '1 s'")
        with world.database.transaction() as session:
            assert queue.expire_leases(session, attempts_max=5) == 1
            assert queue.expire_leases(session, attempts_max=5) == 0
    if loss == "taken by another":
        [other] = claim(world)
        assert other.attempts == 2
    before, made = rows(world), results(world)
    assert not finish(world, held)
    assert not give_back(world, held)
    with world.database.transaction() as session:
        assert queue.renew(session, [held], lease_s=60) == set()
    assert (rows(world), results(world)) == (before, made)


def test_one_result_a_request_is_a_constraint(world: World) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    assert finish(world, held, status_code=400)
    assert rows(world) == [("failed", 1)]
    with pytest.raises(IntegrityError), world.database.transaction() as session:
        session.add(BatchResult(request_id=held.request_id, status_code=200, body={}, upstream_id="again"))
    with pytest.raises(IntegrityError):
        run(world, "UPDATE batch_requests SET state = 'running'")  # running without a lease
    assert results(world) == 1


def test_giving_back_waits_and_counts_only_real_attempts(world: World) -> None:
    world.add_batch(lines=1)
    [held] = claim(world)
    assert give_back(world, held, tried=False)
    assert rows(world) == [("waiting", 0)]
    [held] = claim(world)
    assert held.attempts == 1
    assert give_back(world, held, delay_s=60)
    assert rows(world) == [("waiting", 1)]
    assert claim(world) == []
    with world.database.transaction() as session:
        assert queue.queue_facts(session, aged_s=3600) == ()
    run(world, "UPDATE batch_requests SET not_before = now() - interval '1 ms'")
    assert claim(world)[0].attempts == 2


def test_renewing(world: World) -> None:
    world.add_batch(lines=3)
    held = claim(world, count=3, lease_s=5)
    assert finish(world, held[0])
    with world.database.transaction() as session:
        assert queue.renew(session, held, lease_s=3600) == {held[1].request_id, held[2].request_id}
        left_s = session.scalar(text("SELECT extract(epoch FROM min(lease_until) - now()) FROM batch_requests"))
    assert left_s > 3000


def test_requests_past_their_deadline_end_with_a_line(world: World) -> None:
    batch_id = world.add_batch(lines=3)
    [running] = claim(world)
    [done] = claim(world)
    assert finish(world, done)
    run(world, "UPDATE batch_requests SET deadline_at = now() - interval '1 s'")
    with world.database.transaction() as session:
        assert queue.expire_requests(session) == 2
        assert queue.expire_requests(session) == 0
        found = {r.request_id: r for r in session.scalars(select(BatchResult))}
    assert [state for state, _ in rows(world)] == ["expired", "completed", "expired"]
    assert found[running.request_id].error["code"] == "batch_expired"  # type: ignore[index]
    assert found[running.request_id].status_code is None
    assert not finish(world, running)
    assert world.batch(batch_id).state == "in_progress", "finalizing is the dispatcher's"


def test_queue_facts(world: World) -> None:
    world.add_model("other")
    world.add_batch(lines=3)
    claim(world)
    run(world, "UPDATE batch_requests SET created_at = now() - interval '2 h' WHERE line = 2")
    with world.database.transaction() as session:
        [facts] = queue.queue_facts(session, aged_s=3600)
    assert (facts.model, facts.waiting, facts.aged) == (MODEL, 2, 1)
