"""A tenant's queued batch tokens: charged when a batch is accepted, and back when its requests end."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from controlplane.dispatcher.ingest import VALIDATE
from controlplane.policies.lifecycle import BatchRequestState
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import NewRequest, add_requests, cancel_batch, end_requests
from controlplane.store.blobs.base import BlobStore
from controlplane.store.tenants import (
    Tenant,
    batch_tokens_left,
    find_tenant,
    limits_of,
    put_tenant,
    queued_batch_tokens,
)
from tests.controlplane.world import World, at_once, request_line, until

ANSWER_TOKENS = 100
LINE_TOKENS = 111
"""A quarter of the bytes of the body, and the answer."""


def limit(world: World, most: int | None) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", queued_batch_tokens_max=most))


def submitted(world: World, blobs: BlobStore, lines: int, *, tenant: str = "acme") -> str:
    """A batch that waits for validation; each line may take `LINE_TOKENS`."""
    batch_id = world.add_batch(tenant=tenant)
    with blobs.writing(world.batch(batch_id).input_file_id) as stream:
        for number in range(lines):
            body = {"model": "tide", "prompt": "hi", "max_tokens": ANSWER_TOKENS}
            fields: dict[str, Any] = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            stream.write(msgspec.json.encode(fields | {"body": body}) + b"\n")
    return batch_id


def accepted(world: World, blobs: BlobStore, lines: int, *, tenant: str = "acme") -> Batch:
    batch_id = submitted(world, blobs, lines, tenant=tenant)
    assert world.step(VALIDATE, blobs) == batch_id
    return world.batch(batch_id)


def queued(world: World, tenant: str = "acme") -> int:
    with world.database.transaction() as session:
        return queued_batch_tokens(session, tenant)


def test_a_batch_over_the_limit_fails_and_says_why(world: World, blobs: BlobStore) -> None:
    limit(world, 3 * LINE_TOKENS)
    assert accepted(world, blobs, 2).state == "in_progress"
    assert queued(world) == 2 * LINE_TOKENS
    refused = accepted(world, blobs, 2)
    assert refused.state == "failed"
    assert refused.errors is not None
    [error] = refused.errors["data"]
    assert error["code"] == "token_limit_exceeded"
    for word in (f"{2 * LINE_TOKENS} tokens", f"{LINE_TOKENS} more", "queued_batch_tokens_max", "'acme'"):
        assert word in error["message"]
    assert queued(world) == 2 * LINE_TOKENS, "a refused batch takes nothing"
    assert accepted(world, blobs, 1).state == "in_progress"
    assert accepted(world, blobs, 9, tenant="other").state == "in_progress"


def test_every_end_gives_the_tokens_back(world: World, blobs: BlobStore) -> None:
    limit(world, 4 * LINE_TOKENS)
    batch = accepted(world, blobs, 4)
    left = 4
    for state in (BatchRequestState.EXPIRED, BatchRequestState.FAILED):
        with world.database.transaction() as session:
            assert end_requests(session, [(batch.number, left)], state=state) == 1
        left -= 1
        assert queued(world) == left * LINE_TOKENS
    with world.database.transaction() as session:
        cancel_batch(session, batch.id, tenant="acme")
    assert queued(world) == 0
    assert accepted(world, blobs, 4).state == "in_progress"


def test_zero_refuses_all_and_no_limit_none(world: World, blobs: BlobStore) -> None:
    limit(world, 0)
    assert accepted(world, blobs, 1).state == "failed"
    limit(world, None)
    assert accepted(world, blobs, 50).state == "in_progress"


def test_two_batches_at_once_do_not_both_take_the_last(world: World, blobs: BlobStore) -> None:
    limit(world, LINE_TOKENS)
    ids = [submitted(world, blobs, 1) for _ in range(4)]
    at_once(*[lambda: world.step(VALIDATE, blobs)] * len(ids))
    for _ in ids:  # threads that met at one batch leave others for later
        world.step(VALIDATE, blobs)
    assert sorted(world.batch(batch_id).state for batch_id in ids) == ["failed"] * 3 + ["in_progress"]


def test_a_slow_file_delays_no_other_batch_of_the_tenant(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued while it is read counts."""
    limit(world, 2 * LINE_TOKENS)
    slow, quick = (submitted(world, blobs, lines) for lines in (2, 1))

    def slowly(session: Session, batch: Batch, requests: Iterable[NewRequest]) -> None:
        add_requests(session, batch, requests)
        if batch.id == slow:
            assert world.step(VALIDATE, blobs) == quick

    monkeypatch.setattr("controlplane.dispatcher.ingest.add_requests", slowly)
    assert world.step(VALIDATE, blobs) == slow
    assert [world.batch(each).state for each in (quick, slow)] == ["in_progress", "failed"]
    assert world.batch(quick).attempts == 0
    assert queued(world) == LINE_TOKENS


def test_a_batch_is_cancelled_while_its_tenant_is_locked(world: World, blobs: BlobStore) -> None:
    """By another batch of it that is being accepted, which may take long."""
    limit(world, 2 * LINE_TOKENS)
    batch_id = submitted(world, blobs, 1)

    def cancel() -> None:
        with world.database.transaction() as session:
            session.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert cancel_batch(session, batch_id, tenant="acme").state == "cancelling"

    with ThreadPoolExecutor(1) as thread:
        with world.database.transaction() as accepting:
            assert batch_tokens_left(accepting, "acme", world.settings) == 2 * LINE_TOKENS
            step = thread.submit(world.step, VALIDATE, blobs)
            until(world.is_waiting_for_a_lock)
            cancel()
        assert step.result() == batch_id
    assert world.batch(batch_id).state == "cancelling"


def test_what_another_dispatcher_queues_meanwhile_counts(world: World, blobs: BlobStore) -> None:
    """The lock is taken after a first sum: what was queued between the two is added."""
    limit(world, 9 * LINE_TOKENS)
    accepted(world, blobs, 2)
    other = world.add_batch()

    def left() -> int | None:
        with world.database.transaction() as session:
            return batch_tokens_left(session, "acme", world.settings)

    with ThreadPoolExecutor(1) as thread:
        with world.database.transaction() as session:
            assert batch_tokens_left(session, "acme", world.settings) == 7 * LINE_TOKENS
            waiting = thread.submit(left)
            until(world.is_waiting_for_a_lock)
            lines = (request_line(number)._replace(tokens=LINE_TOKENS) for number in (1, 2, 3))
            add_requests(session, session.get_one(Batch, other), lines)
        assert waiting.result() == 4 * LINE_TOKENS


def test_a_tenant_without_a_row_has_the_defaults(world: World) -> None:
    settings = world.settings.model_copy(update={"tenant_concurrent_max": 7})
    with world.database.transaction() as session:
        assert find_tenant(session, "acme") is None
        assert limits_of(None, settings).concurrent_max == 7
        row = put_tenant(session, Tenant(name="acme"))
        assert limits_of(row, settings).concurrent_max is None, "a row says all"


def test_who_limits_a_tenant_second_finds_the_first_ones_limits(world: World) -> None:
    def change() -> int | None:
        with world.database.transaction() as session:
            found = find_tenant(session, "acme")
            before = found and found.concurrent_max
            put_tenant(session, Tenant(name="acme", concurrent_max=2))
            return before

    with ThreadPoolExecutor(1) as thread:
        with world.database.transaction() as session:
            assert find_tenant(session, "acme") is None
            changing = thread.submit(change)
            until(world.is_waiting_for_a_lock)
            put_tenant(session, Tenant(name="acme", concurrent_max=1))
        assert changing.result() == 1
