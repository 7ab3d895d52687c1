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


def outcome(line: int) -> Outcome:
    claim = Claim(
        batch_number=1, line=line, epoch=1, batch_id="b", tenant="t", endpoint="e", model="m", body="{}", attempts=1
    )
    return Outcome(claim=claim, status_code=200, body={})


def test_results_that_take_too_long_together_are_written_in_smaller_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres ends a statement of more than 100 of them; a group of the same size would never be written."""
    tried: list[int] = []

    def finish(_: object, outcomes: list[Outcome]) -> set[tuple[int, int]]:
        tried.append(len(outcomes))
        if len(outcomes) > 100:
            raise OperationalError("INSERT", {}, Exception("canceling statement due to statement timeout"))
        return {each.claim.key for each in outcomes}

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
