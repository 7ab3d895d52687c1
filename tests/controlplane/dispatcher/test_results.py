"""Results that wait for Postgres: how many are written together."""

import asyncio
from contextlib import contextmanager
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from controlplane.dispatcher import results
from controlplane.dispatcher.results import ResultWriter
from controlplane.store.queue import Claim, Outcome
from controlplane.store.session import Database


class NoDatabase:
    @contextmanager
    def statement(self) -> Any:
        yield None


def outcome(line: int, batch: int = 1) -> Outcome:
    claim = Claim(
        batch_number=batch, line=line, epoch=1, batch_id="b", tenant="t", endpoint="e", model="m", body="{}", attempts=1
    )
    return Outcome(claim=claim, status_code=200, body={})


def test_results_that_take_too_long_together_are_written_in_smaller_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres ends a statement of more than 100 of them; a group of the same size would never be written."""
    tried: list[int] = []

    def finish(_: object, outcomes: list[Outcome]) -> dict[tuple[int, int], bool]:
        tried.append(len(outcomes))
        if len(outcomes) > 100:
            raise OperationalError("INSERT", {}, Exception("canceling statement due to statement timeout"))
        return {each.claim.key: True for each in outcomes}

    monkeypatch.setattr(results.queue, "finish", finish)
    monkeypatch.setattr(results, "_RETRY_S", 0.0)

    async def run() -> list[bool]:
        writer = ResultWriter(cast("Database", NoDatabase()))
        first = asyncio.create_task(writer.write(outcome(0)))
        return await asyncio.wait_for(asyncio.gather(first, *(writer.write(outcome(n)) for n in range(1, 600))), 30)

    assert asyncio.run(run()) == [True] * 600
    assert max(tried[:3]) > 100
    assert sum(count for count in tried if count <= 100) == 600
    assert sum(count > 100 for count in tried) < len(tried) / 2


def test_a_result_that_is_never_written_in_time_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(_: object, outcomes: list[Outcome]) -> dict[tuple[int, int], bool]:
        if any(each.claim.line == 0 for each in outcomes):
            raise OperationalError("INSERT", {}, Exception("canceling statement due to statement timeout"))
        return {each.claim.key: True for each in outcomes}

    monkeypatch.setattr(results.queue, "finish", finish)
    monkeypatch.setattr(results, "_RETRY_S", 0.0)

    async def run() -> None:
        writer = ResultWriter(cast("Database", NoDatabase()))
        slow, *others = (asyncio.create_task(writer.write(outcome(n))) for n in range(40))
        assert await asyncio.wait_for(asyncio.gather(*others), 30) == [True] * 39
        slow.cancel()

    asyncio.run(run())


def test_results_of_a_batch_that_is_being_ended_are_written_or_dropped_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = False

    def finish(_: object, outcomes: list[Outcome]) -> dict[tuple[int, int], bool]:
        batches = {each.claim.key: each.claim.batch_number for each in outcomes}
        return {key: batch == 2 for key, batch in batches.items() if ended or batch == 2}

    monkeypatch.setattr(results.queue, "finish", finish)
    monkeypatch.setattr(results, "_RETRY_S", 0.0)

    async def run() -> None:
        nonlocal ended
        writer = ResultWriter(cast("Database", NoDatabase()))
        ending, other = (asyncio.create_task(writer.write(outcome(1, batch))) for batch in (1, 2))
        assert await asyncio.wait_for(other, 30)
        assert await asyncio.wait_for(writer.write(outcome(2, 2)), 30)
        assert not ending.done()
        ended = True
        assert not await asyncio.wait_for(ending, 30)

    asyncio.run(run())
