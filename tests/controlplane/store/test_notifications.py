"""Notifications of the queue: who listens learns of every change that makes work, when it is committed, also after
Postgres was away.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread
import pytest
from pydantic import SecretStr
from sqlalchemy import select, text, update

from controlplane.policies.lifecycle import BatchRequestState
from controlplane.store import queue
from controlplane.store.batch_attempts import Due, begin_attempt
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.batches import cancel_batch, end_batch_requests
from controlplane.store.notifications import Wake, listen, notify
from tests.controlplane.world import PATIENCE_S, World, claim_waiting

Woken = list[tuple[Wake, float]]
EVERYTHING = {(wake, 0.0) for wake in Wake}
ENDED = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"


async def holds(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (conditions are about another task)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(world: World) -> AsyncIterator[Woken]:
    """What is heard since the listener was ready."""
    heard: Woken = []
    task = asyncio.create_task(listen(world.settings, lambda wake, delay_s: heard.append((wake, delay_s))))
    try:
        await holds(lambda: set(heard) == EVERYTHING)
        heard.clear()
        yield heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def heard_of(world: World, change: Callable[[World], Any]) -> set[tuple[Wake, float]]:
    """What a listener hears of a change, up to the next notification."""

    async def run() -> set[tuple[Wake, float]]:
        async with listening(world) as heard:
            await anyio.to_thread.run_sync(change, world)
            with world.database.transaction() as session:
                notify(session, Wake.VALIDATE, delay_s=99)
            await holds(lambda: (Wake.VALIDATE, 99.0) in heard)
            return set(heard) - {(Wake.VALIDATE, 99.0)}

    return asyncio.run(run())


def submit(world: World) -> None:
    world.add_batch()


def validated(world: World) -> None:
    world.add_batch(lines=1)


def attempt(world: World) -> None:
    with world.database.transaction() as session:
        assert begin_attempt(session, Due.VALIDATION) is not None


def cancel(world: World) -> None:
    with world.database.transaction() as session:
        batch = session.scalars(select(Batch)).one()
        cancel_batch(session, batch.id, tenant=batch.tenant)


def expire(world: World) -> None:
    with world.database.transaction() as session:
        session.execute(text("UPDATE batches SET deadline_at = now() - interval '1 s'"))
        [number] = queue.overdue_batches(session)
        assert queue.expire_requests(session, number) == 2


def give_back(world: World) -> None:
    with world.database.transaction() as session:
        [held, *_] = claim_waiting(session, 1)
        assert queue.give_back(session, held, delay_s=7.5, error="no", tried=True)


def lose_leases(world: World) -> None:
    with world.database.transaction() as session:
        claim_waiting(session, 2)
        session.execute(update(QueuedRequest).values(lease_until=text("now() - interval '1 s'")))
    with world.database.transaction() as session:
        assert queue.expire_leases(session, attempts_max=5, count_max=1000) == 2


@pytest.mark.parametrize(
    ("before", "change", "heard"),
    [
        (None, submit, {(Wake.VALIDATE, 0.0)}),
        (None, validated, {(Wake.VALIDATE, 0.0), (Wake.RELEASE, 0.0), (Wake.FINALIZE, 0.0)}),
        (submit, attempt, {(Wake.VALIDATE, 2.0)}),
        ("open", cancel, {(Wake.FINALIZE, 0.0)}),
        ("open", expire, {(Wake.FINALIZE, 0.0)}),
        ("open", give_back, {(Wake.RELEASE, 7.5)}),
    ],
)
def test_a_change_that_makes_work_is_heard(world: World, before: Any, change: Any, heard: Any) -> None:
    if before == "open":
        world.add_batch(lines=2)
    elif before is not None:
        before(world)
    assert heard_of(world, change) == heard


def test_requests_whose_leases_were_lost_wake_when_they_may_be_claimed(world: World) -> None:
    world.add_batch(lines=2)
    heard = heard_of(world, lose_leases)
    assert heard <= {(Wake.RELEASE, 1.0), (Wake.RELEASE, 2.0)}
    assert heard


def test_nothing_is_heard_of_what_was_rolled_back_or_changes_nothing(world: World) -> None:
    batch_id = world.add_batch(lines=1)

    def nothing(world: World) -> None:
        with contextlib.suppress(ZeroDivisionError), world.database.transaction() as session:
            end_batch_requests(session, world.batch(batch_id).number, state=BatchRequestState.CANCELLED)
            raise ZeroDivisionError
        with world.database.transaction() as session:
            assert queue.expire_leases(session, attempts_max=5, count_max=1000) == 0
            assert queue.overdue_batches(session) == []

    assert heard_of(world, nothing) == set()


def test_a_listener_whose_connection_was_lost_hears_again_and_is_told_of_everything(world: World) -> None:
    async def run() -> None:
        async with listening(world) as heard:
            with world.database.transaction() as session:
                assert session.scalars(text(f"{ENDED} AND datname = current_database()")).all() == [True]
            await holds(lambda: set(heard) == EVERYTHING)
            with world.database.transaction() as session:
                notify(session, Wake.FINALIZE, delay_s=3)
            await holds(lambda: (Wake.FINALIZE, 3.0) in heard)

    asyncio.run(run())


def test_a_listener_waits_for_a_postgres_that_is_away(world: World) -> None:
    address = SecretStr("postgresql+psycopg://x@127.0.0.1:1/x")
    away = world.settings.model_copy(update={"database_url": address})

    async def run() -> None:
        heard: Woken = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await listen(away, lambda wake, delay_s: heard.append((wake, delay_s)))
        assert not heard

    asyncio.run(run())
