"""Dispatchers at work before nodes that answer as told: exactly one result a line, whatever fails."""

import asyncio
import base64
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from openai.types.responses import Response
from redis import Redis
from sqlalchemy import Engine, event, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from controlplane.dispatcher.outcomes import Outcomes
from controlplane.dispatcher.process import Dispatcher, Intervals, run_forever
from controlplane.dispatcher.release import Releaser
from controlplane.dispatcher.waiting_groups import WaitingGroups
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import BatchState
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.pooling_requests import EMBEDDINGS
from controlplane.serving.responses.requests import RESPONSES
from controlplane.settings import Settings
from controlplane.store import queue
from controlplane.store.batch_tables import Batch, BatchResult, QueuedRequest
from controlplane.store.batches import add_requests, cancel_batch, move_batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.notifications import Wake, notify
from controlplane.store.queue import Claim, batch_groups, expire_leases, expire_requests, overdue_batches
from controlplane.store.responses import ResponseRow
from controlplane.store.session import make_engine
from dataplane.protocol.messages import Finished, Token, ToolCallDelta
from ops.local.ports import free_port
from tests.controlplane.dispatcher.test_ingest import line, submitted
from tests.controlplane.world import HANGS_S, NODE_KEY, PATIENCE_S, FakeAgent, World, request_line, served

FAST = {
    "heartbeat_stale_s": 600.0,
    "view_refresh_s": 0.05,
    "release_hold_s": 0.05,
    "release_growth_after_cut": 32.0,
    "node_key": NODE_KEY,
}


HERE = "its own address"
QUICK = Intervals(release_s=0.02, release_gap_s=0.01, batches_s=0.05, retry_s=0.01)


@contextlib.asynccontextmanager
async def dispatchers(
    world: World, count: int = 1, *, intervals: Intervals = QUICK, **changes: Any
) -> AsyncIterator[list[asyncio.Task[None]]]:
    settings = Settings(**world.settings.model_dump() | FAST | changes)
    tasks = [asyncio.create_task(Dispatcher(settings, intervals).run()) for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def ended(world: World, batch_id: str) -> Any:
    await holds(lambda: world.batch(batch_id).ended_at)
    return world.batch(batch_id)


def finished(world: World, agent: FakeAgent, batch_id: str, **changes: Any) -> Any:
    """The batch once a dispatcher and one node have ended it."""

    async def run() -> Any:
        async with dispatchers(world, **changes):
            return await ended(world, batch_id)

    with served(agent.app) as url:
        world.serve("n1", url)
        return asyncio.run(run())


async def holds(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  (conditions are about other threads)
            await asyncio.sleep(0.02)


def lines_of(blobs: BlobStore, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    with blobs.open(file_id) as stream:
        return [msgspec.json.decode(line) for line in stream]


def open_rows(world: World) -> list[tuple[bool, int, str | None]]:
    """(is leased, attempts, last error) of the requests without a result."""
    with world.database.transaction() as session:
        rows = session.scalars(select(QueuedRequest).order_by(QueuedRequest.batch_number, QueuedRequest.line))
        return [(row.lease_until is not None, row.attempts, row.last_error) for row in rows]


def results(world: World) -> list[tuple[str, str]]:
    """(state, who answered) of the requests with a result whose batch has not ended."""
    with world.database.transaction() as session:
        rows = session.scalars(select(BatchResult).order_by(BatchResult.batch_number, BatchResult.line))
        return [(row.state, row.upstream_id) for row in rows]


def test_two_dispatchers_make_one_result_a_line(world: World, blobs: BlobStore) -> None:
    east, west = FakeAgent(), FakeAgent(then="slow")

    async def run() -> Any:
        async with dispatchers(world, 2):
            return await ended(world, batch_id)

    with served(east.app) as first, served(west.app) as second:
        world.serve("n1", first)
        world.serve("n2", second, region="us-west")
        batch_id = world.add_batch(lines=30)
        batch = asyncio.run(run())
    assert (batch.state, batch.error_file_id) == ("completed", None)
    output = lines_of(blobs, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"c{n}" for n in range(1, 31)], "in the order of the input"
    assert len({line["id"] for line in output}) == 30
    answer = output[0]["response"]
    assert (answer["status_code"], output[0]["error"]) == (200, None)
    assert answer["body"]["choices"][0]["text"] == "the tide turns"
    assert answer["body"]["service_tier"] == "flex"
    assert {asked.tier for asked in east.asked + west.asked} == {"NIW"}
    assert len(east.asked) + len(west.asked) == 30, "nobody is asked twice"


def test_who_puts_a_batch_into_the_queue_looks_at_once(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its pauses are: the one look before found the queue empty."""
    rarely = replace(QUICK, release_s=HANGS_S)
    looks: list[object] = []

    def look(session: Any, **limits: Any) -> Any:
        looks.append(batch_groups(session, **limits))
        return looks[-1]

    monkeypatch.setattr("controlplane.dispatcher.waiting_groups.queue.batch_groups", look)

    async def run() -> None:
        async with dispatchers(world, intervals=rarely):
            await holds(lambda: looks)
            batch_id = submitted(world, blobs, line())
            assert (await ended(world, batch_id)).state == "completed"
            assert not looks[0]

    agent = FakeAgent()
    with served(agent.app) as url:
        world.serve("n1", url)
        asyncio.run(run())
    assert len(agent.asked) == 1


@pytest.fixture
def about_batches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dispatchers' statements that name a table of batches or of the queue."""
    asked: list[str] = []

    def counted(settings: Settings) -> Engine:
        engine = make_engine(settings)
        event.listen(engine, "before_cursor_execute", lambda *args: asked.append(args[2]) if "batch" in args[2] else 0)
        return engine

    monkeypatch.setattr("controlplane.dispatcher.process.make_engine", counted)
    return asked


async def quiet(statements: list[str]) -> None:
    """Wait for two seconds without a statement: many times the interval of any poll but the last resort's."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.sleep(0.5)
        while statements:
            statements.clear()
            await asyncio.sleep(2)


def test_batches_that_wait_cost_no_statement_until_postgres_notifies(world: World, about_batches: list[str]) -> None:
    """Nor do those that wait for their next attempt."""

    async def run() -> None:
        async with dispatchers(world, intervals=Intervals(batches_s=0.05)):
            await holds(lambda: about_batches)
            await quiet(about_batches)
            with world.database.transaction() as session:
                session.execute(update(QueuedRequest).values(not_before=None))
                session.execute(update(Batch).values(not_before=None))
                notify(session, *Wake)
            assert (await ended(world, waiting)).state == "completed"
            assert (await ended(world, failing)).state == "failed"

    waiting, failing = world.add_batch(lines=3), world.add_batch()
    with world.database.transaction() as session:
        in_a_week = text("now() + interval '7 d'")
        session.execute(update(QueuedRequest).values(not_before=in_a_week))
        session.execute(update(Batch).values(not_before=in_a_week, deadline_at=text("now() + interval '8 d'")))
    with served(FakeAgent().app) as url:
        world.serve("n1", url)
        asyncio.run(run())


def test_a_dispatcher_whose_listener_was_ended_misses_nothing(world: World) -> None:
    """What is submitted while nobody listens is found when it listens again; the next poll is an hour away."""

    def listeners() -> set[int]:
        listening = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        with world.database.transaction() as session:
            return set(session.scalars(text(listening)))

    async def run() -> None:
        async with dispatchers(world, intervals=Intervals(batches_s=0.05, poll_s=3600.0)):
            assert (await ended(world, world.add_batch(lines=3))).state == "completed"
            for _ in range(3):
                await holds(listeners)
                [pid] = listeners()
                with world.database.transaction() as session:
                    assert session.scalar(text(f"SELECT pg_terminate_backend({pid})"))
                await holds(lambda pid=pid: pid not in listeners())
                batches = [world.add_batch(lines=3), world.add_batch()]
                assert [(await ended(world, each)).state for each in batches] == ["completed", "failed"]

    with served(FakeAgent().app) as url:
        world.serve("n1", url)
        asyncio.run(run())


def test_batches_without_capacity_cost_no_statement_until_there_is_some(world: World, about_batches: list[str]) -> None:
    async def run() -> None:
        async with dispatchers(world, intervals=Intervals(batches_s=0.05)):
            await holds(lambda: about_batches)
            await quiet(about_batches)
            world.report("n1", instance_id, region="us-east", url=url)
            assert (await ended(world, batch_id)).state == "completed"

    batch_id = world.add_batch(lines=3)
    with served(FakeAgent().app) as url:
        instance_id = world.serve("n1", url, used=0.95)
        asyncio.run(run())


def test_lines_that_an_older_version_stored_are_validated_again(world: World, blobs: BlobStore) -> None:
    """It stored the bodies as its clients sent them, by rules that may have been others."""
    agent = FakeAgent()
    bodies = (
        {"model": "tide", "prompt": ["older"], "max_tokens": 4, "request_id": None},
        {"model": "tide", "prompt": "older", "suffix": "x"},
    )
    with world.database.transaction() as session:
        batch = session.get_one(Batch, batch_id := world.add_batch())
        add_requests(session, batch, (request_line(n, msgspec.json.encode(b)) for n, b in enumerate(bodies, 1)))
        move_batch(session, batch, BatchState.IN_PROGRESS)
    batch = finished(world, agent, batch_id)
    [good], [failed] = lines_of(blobs, batch.output_file_id), lines_of(blobs, batch.error_file_id)
    assert (good["custom_id"], failed["custom_id"]) == ("c1", "c2")
    assert failed["response"]["body"]["error"]["code"] == "unsupported_parameter"
    assert [(asked.prompt, asked.sampling.max_tokens) for asked in agent.asked] == [("older", 4)]


def test_what_a_node_refuses_is_an_error_line(world: World, blobs: BlobStore) -> None:
    agent = FakeAgent("too long")
    batch = finished(world, agent, world.add_batch(lines=2))
    assert batch.state == "completed"
    [failed], [good] = lines_of(blobs, batch.error_file_id), lines_of(blobs, batch.output_file_id)
    assert (failed["response"]["status_code"], failed["error"]) == (400, None)
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert {failed["custom_id"], good["custom_id"]} == {"c1", "c2"}


def test_failures_of_nodes_are_tried_again_but_not_for_ever(world: World, blobs: BlobStore) -> None:
    agent = FakeAgent("die", "garbage", "die later", "worker lost")  # four of five attempts

    async def run() -> Any:
        async with dispatchers(world, stream_continuations_max=0):
            return await ended(world, batch_id)

    with served(agent.app) as url:
        world.serve("n1", url)
        batch_id = world.add_batch(lines=1)
        [line] = lines_of(blobs, asyncio.run(run()).output_file_id)
        assert line["response"]["request_id"].endswith("_9"), "the fifth claim's"
        agent.then, batch_id = "worker lost", world.add_batch(lines=1)
        batch = asyncio.run(run())
    [line] = lines_of(blobs, batch.error_file_id)
    assert (line["response"], line["error"]["code"]) == (None, "attempts_exhausted")
    assert "The last of 5: the worker died" in line["error"]["message"]
    assert len(agent.asked) == 5 + 5


def test_a_defect_of_ours_is_tried_again_but_not_for_ever(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*_: Any) -> Any:
        raise RuntimeError("a body of a later release")

    monkeypatch.setattr("controlplane.dispatcher.release.queued_query", defective)

    async def run() -> Any:
        async with dispatchers(world, niw_attempts_max=1):
            return await ended(world, batch_id)

    with served(FakeAgent().app) as url:
        world.serve("n1", url)
        batch_id = world.add_batch(lines=1)
        [line] = lines_of(blobs, asyncio.run(run()).error_file_id)
    assert (line["response"], line["error"]["code"]) == (None, "attempts_exhausted")
    assert "The last of 1: internal error" in line["error"]["message"]


def test_a_full_node_costs_no_attempt(world: World, blobs: BlobStore) -> None:
    agent = FakeAgent(*["overloaded", "not ready", "wrong key"] * 3)
    batch_id = world.add_batch(lines=1)
    batch = finished(world, agent, batch_id, niw_attempts_max=1)
    assert (batch.state, batch.completed, batch.error_file_id) == ("completed", 1, None)
    assert [asked.epoch for asked in agent.asked] == list(range(1, 20, 2)), "each claim has an epoch of its own"
    assert {asked.fence for asked in agent.asked} == {f"{batch_id}/1"}


def test_a_node_that_is_not_reached_costs_no_attempt_and_gets_fewer_requests(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_by(monkeypatch, None, f"http://127.0.0.1:{free_port()}", None)
    batch = finished(world, FakeAgent(), world.add_batch(lines=1), niw_attempts_max=1)
    assert (batch.state, batch.completed, batch.error_file_id) == ("completed", 1, None)
    at = Endpoint(model="tide", region="us-east")
    assert world.live.read_windows([at])[1][at].cut_s > 0


def test_an_instance_that_is_not_ready_cuts_no_window(world: World) -> None:
    batch = finished(world, FakeAgent("not ready"), world.add_batch(lines=1), niw_attempts_max=1)
    assert (batch.state, batch.completed) == ("completed", 1)
    at = Endpoint(model="tide", region="us-east")
    assert world.live.read_windows([at])[1][at].cut_s <= 0


def test_a_request_that_a_node_died_of_was_tried_though_others_were_not_reached(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent(then="die later")
    answered_by(monkeypatch, HERE, *[f"http://127.0.0.1:{free_port()}"] * 1000)
    batch = finished(world, agent, world.add_batch(lines=1), niw_attempts_max=1, stream_continue_wait_s=1)
    [line] = lines_of(blobs, batch.error_file_id)
    assert line["error"]["code"] == "attempts_exhausted"
    assert "cannot be reached" in line["error"]["message"]
    assert len(agent.asked) == 1


def answered_by(monkeypatch: pytest.MonkeyPatch, *urls: str | None) -> None:
    """Have nodes these addresses one after the other (None: none; `HERE`: their own), and then their own."""
    own, left = FleetCache.node_url, list(urls)

    def node_url(fleet: FleetCache, node: str) -> str | None:
        url = left.pop(0) if left else HERE
        return own(fleet, node) if url == HERE else url

    monkeypatch.setattr(FleetCache, "node_url", node_url)


def test_each_request_is_demand_once_whatever_nodes_do(world: World, blobs: BlobStore, redis_client: Redis) -> None:
    agent = FakeAgent("overloaded", "die", "overloaded", "worker lost")
    assert finished(world, agent, world.add_batch(lines=3)).completed == 3
    assert len(agent.asked) == 3 + 4
    keys = [str(key) for key in redis_client.scan_iter("tidepool:demand:*")]
    counts = [count for key in keys for count in world.live.read_demand(int(key.rsplit(":", 1)[1])) or []]
    assert {count.kind for count in counts} == {"NIW"}
    assert sum(count.tokens for count in counts) == 3 * 2, "`line n` is 6 bytes"


def test_text_that_jsonb_would_refuse_is_kept(world: World, blobs: BlobStore) -> None:
    agent = FakeAgent(then="nul")
    [line] = lines_of(blobs, finished(world, agent, world.add_batch(lines=1)).output_file_id)
    assert line["response"]["body"]["choices"][0]["text"] == "the\0tide turns"


def stop_while_running(world: World, *, lines: int) -> None:
    """Stop a dispatcher while a node works on all lines of a batch, and wait until the node knows."""
    agent = FakeAgent(then="hang later")

    async def run() -> None:
        async with dispatchers(world):
            await holds(lambda: len(agent.asked) == lines)

    with served(agent.app) as url:
        world.serve("n1", url)
        world.add_batch(lines=lines)
        asyncio.run(run())
        assert agent.dropped.wait(PATIENCE_S)


def test_a_stopped_dispatcher_gives_back_at_once(world: World) -> None:
    stop_while_running(world, lines=2)
    assert open_rows(world) == [(False, 0, "its dispatcher was stopped")] * 2


def test_a_result_after_a_lost_lease_is_dropped(world: World, blobs: BlobStore) -> None:
    """The lease runs out while a node is slow; another dispatcher's answer is the one that counts."""
    agent = FakeAgent(then="held")

    async def run() -> Any:
        async with dispatchers(world):
            await holds(lambda: len(agent.asked) == 1)
            with world.database.transaction() as session:
                session.execute(text("UPDATE queued_requests SET lease_until = now() - interval '1 s'"))
                assert expire_leases(session, attempts_max=5, count_max=1000) == 1
                session.execute(text("UPDATE queued_requests SET not_before = NULL"))
            await holds(lambda: len(agent.asked) == 2)
            agent.freed.set()
            return await ended(world, batch_id)

    with served(agent.app) as url:
        world.serve("n1", url)
        batch_id = world.add_batch(lines=1)
        [line] = lines_of(blobs, asyncio.run(run()).output_file_id)
    assert [asked.epoch for asked in agent.asked] == [1, 3]
    assert line["response"]["request_id"].endswith("_3"), "the second claim's"


def test_a_lease_that_is_lost_breaks_off_the_work(world: World) -> None:
    agent = FakeAgent(then="hang later")

    async def run() -> None:
        async with dispatchers(world, niw_lease_s=5):
            await holds(lambda: agent.asked)
            with world.database.transaction() as session:
                cancel_batch(session, batch_id, tenant="acme")
            await holds(agent.dropped.is_set)

    with served(agent.app) as url:
        world.serve("n1", url)
        batch_id = world.add_batch(lines=1)
        asyncio.run(run())
    assert open_rows(world) == []
    assert world.batch(batch_id).state in {"cancelling", "cancelled"}


@pytest.mark.parametrize(("end", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
def test_finished_lines_are_kept(world: World, blobs: BlobStore, end: str, code: str) -> None:
    agent = FakeAgent("answer", "answer", then="hang")

    async def run() -> Any:
        async with dispatchers(world):
            await holds(lambda: len(results(world)) == 2)
            with world.database.transaction() as session:
                if end == "cancelled":
                    cancel_batch(session, batch_id, tenant="acme")
                else:
                    session.execute(text("UPDATE batches SET deadline_at = now() - interval '1 s'"))
                    assert [expire_requests(session, number) for number in overdue_batches(session)] == [3]
            return await ended(world, batch_id)

    with served(agent.app) as url:
        world.serve("n1", url)
        batch_id = world.add_batch(lines=5)
        batch = asyncio.run(run())
    assert batch.state == end
    done, not_done = lines_of(blobs, batch.output_file_id), lines_of(blobs, batch.error_file_id)
    assert len(done) == 2
    assert {line["response"] for line in not_done} == {None}
    assert [line["error"]["code"] for line in not_done] == [code] * 3
    assert {line["custom_id"] for line in done + not_done} == {f"c{n}" for n in range(1, 6)}


def test_no_room_no_release(world: World) -> None:
    agent = FakeAgent()

    async def run() -> None:
        async with releaser_of(world) as (_, releaser):
            await releaser.release()

    with served(agent.app) as url:
        world.serve("n1", url, used=0.61)
        world.add_batch(lines=1)
        asyncio.run(run())
    assert (agent.asked, open_rows(world)) == ([], [(False, 0, None)])


def test_what_waits_ages_between_two_reads_until_its_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: clock_s)
    monkeypatch.setattr("controlplane.dispatcher.waiting_groups.time", clock)
    waiting = WaitingGroups(world.database, poll_s=3600.0)
    world.add_batch(lines=3, window_s=600)
    [read] = asyncio.run(waiting.read())
    clock_s = 500.0
    [later] = asyncio.run(waiting.read())
    assert (later.age_s, later.left_s) == (read.age_s + 500, read.left_s - 500)
    waiting.forget()
    monkeypatch.setattr(waiting, "_read", Mock(side_effect=ConnectionError))
    with pytest.raises(ConnectionError):
        asyncio.run(waiting.read())
    assert asyncio.run(waiting.read()) == (later,), "a read that failed makes nothing younger"
    clock_s = 600.0
    assert asyncio.run(waiting.read()) == ()


@pytest.mark.usefixtures("an_hour_ahead")
def test_windows_go_by_the_clock_of_redis(world: World) -> None:
    at = Endpoint(model="tide", region="us-east")

    async def run() -> None:
        async with releaser_of(world) as (_, releaser):
            await releaser.release()

    with served(FakeAgent().app) as url:
        world.serve("n1", url)
        world.add_batch(lines=1)
        asyncio.run(run())
    now_s, windows = world.live.read_windows([at])
    assert now_s - PATIENCE_S < windows[at].stepped_s <= now_s


@contextlib.asynccontextmanager
async def releaser_of(world: World, **changes: Any) -> AsyncIterator[tuple[FleetCache, Releaser]]:
    settings = Settings(**world.settings.model_dump() | FAST | changes)
    async with Dispatcher(settings, QUICK).parts(lambda: None) as (_, _, fleet, releaser):
        yield fleet, releaser


def test_a_claim_that_is_under_way_at_the_stop_is_given_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, entered, may_go = queue.claim, threading.Event(), threading.Event()

    def slow(*args: Any, **wanted: Any) -> list[Claim]:
        entered.set()
        assert may_go.wait(PATIENCE_S)
        return claim(*args, **wanted)

    monkeypatch.setattr("controlplane.store.queue.claim", slow)

    async def run() -> None:
        async with releaser_of(world) as (_, releaser):
            releasing = asyncio.create_task(releaser.release())
            await holds(entered.is_set)
            releasing.cancel()
            await asyncio.wait([releasing])
            stopping = asyncio.create_task(releaser.stop())
            done, _ = await asyncio.wait([stopping], timeout=0.2)
            may_go.set()
            assert not done, "it waits for the claim"
            await stopping
            assert open_rows(world) == [(False, 0, "its dispatcher was stopped")]

    with served(FakeAgent().app) as url:
        world.serve("n1", url)
        world.add_batch(lines=1)
        asyncio.run(run())


@pytest.mark.parametrize(("at_once", "returned"), [(500, 0), (2, 3)])
def test_a_stopped_dispatcher_gives_back_many_at_once_and_goes_on_where_some_fail(
    world: World, monkeypatch: pytest.MonkeyPatch, at_once: int, returned: int
) -> None:
    """The first statement of five claims, or of two."""
    give_back, tried = queue.give_back, list[int]()

    def failing_first(session: Session, *held: Claim, **why: Any) -> int:
        tried.append(len(held))
        if len(tried) == 1:
            raise OperationalError("UPDATE", {}, Exception("canceling statement due to statement timeout"))
        return give_back(session, *held, **why)

    monkeypatch.setattr("controlplane.store.queue.give_back", failing_first)
    monkeypatch.setattr("controlplane.dispatcher.release._RETURNED_AT_ONCE", at_once)
    stop_while_running(world, lines=5)
    assert tried == ([5] if at_once == 500 else [2, 2, 1])
    assert sum(not leased for leased, *_ in open_rows(world)) == returned


def test_nothing_goes_to_a_node_that_has_not_beaten_since_redis_came_back(world: World, redis_client: Redis) -> None:
    agent = FakeAgent()

    async def run() -> None:
        async with releaser_of(world) as (fleet, releaser):
            redis_client.flushdb()
            await asyncio.to_thread(fleet.read_view)
            await releaser.release()
            assert open_rows(world) == [(False, 0, None)]
            assert fleet.instances(), "requests with somebody waiting still go there"
            world.report("n1", instance_id, region="us-east", url=url)
            await asyncio.to_thread(fleet.read_view)
            await releaser.release()
            await holds(lambda: results(world))

    with served(agent.app) as url:
        instance_id = world.serve("n1", url)
        world.add_batch(lines=1)
        asyncio.run(run())
    assert len(agent.asked) == 1


def test_an_error_of_the_disk_is_waited_for() -> None:
    async def work() -> None:
        raise errors.pop()

    async def no_rest() -> None:
        await asyncio.sleep(0)

    errors: list[BaseException] = [asyncio.CancelledError(), OSError("gone"), OSError()]
    with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        asyncio.run(run_forever(work, no_rest, "validated", Outcomes(), retry_s=0.0))
    assert [(entry["event"], entry["error"]) for entry in logs] == [("the dispatcher waits", "OSError: ")]


def test_a_line_with_several_answers_has_one_result(world: World, blobs: BlobStore) -> None:
    agent = FakeAgent()
    batch_id = submitted(
        world,
        blobs,
        line("plain"),
        line("several", body={"n": 2, "prompt": ["x", "y"], "echo": True, "seed": 3}),
    )
    batch = finished(world, agent, batch_id)
    assert (batch.state, batch.error_file_id) == ("completed", None)
    plain, several = lines_of(blobs, batch.output_file_id)
    assert [choice["text"] for choice in plain["response"]["body"]["choices"]] == ["the tide turns"]
    body = several["response"]["body"]
    assert [(each["index"], each["text"]) for each in body["choices"]] == [
        (0, "xthe tide turns"),
        (1, "xthe tide turns"),
        (2, "ythe tide turns"),
        (3, "ythe tide turns"),
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (14, 12)
    assert len(agent.asked) == 5
    assert len({asked.fence for asked in agent.asked}) == 5, "a node would take two claims of one fence for one request"


def embedded(custom_id: str, **body: Any) -> bytes:
    return line(custom_id, url=EMBEDDINGS, body_is={"model": "tide", **body})


def test_lines_of_embeddings_have_one_answer_for_all_their_inputs(world: World, blobs: BlobStore) -> None:
    world.add_model("tide", task="embed")
    agent = FakeAgent("overloaded", "worker lost")
    agent.pooled = lambda generate: (float(len(generate.prompt or "")), 1.0)
    lines = (embedded("one", input="abc"), embedded("many", input=["a", "abcd", "ab"], encoding_format="base64"))
    batch_id = submitted(world, blobs, *lines, endpoint=EMBEDDINGS)
    batch = finished(world, agent, batch_id)
    assert (batch.state, batch.completed, batch.failed) == ("completed", 2, 0)
    bodies = {each["custom_id"]: each["response"]["body"] for each in lines_of(blobs, batch.output_file_id)}
    assert bodies["one"]["data"] == [{"object": "embedding", "index": 0, "embedding": [3.0, 1.0]}]
    made = [struct.unpack("<2f", base64.b64decode(each["embedding"])) for each in bodies["many"]["data"]]
    assert made == [(1.0, 1.0), (4.0, 1.0), (2.0, 1.0)]
    assert bodies["many"]["usage"] == {"prompt_tokens": 21, "total_tokens": 21}
    assert all(generate.pooling and generate.tier == "NIW" for generate in agent.asked)


def test_a_batch_that_asks_a_model_for_what_it_does_not_answer_fails_whole(world: World, blobs: BlobStore) -> None:
    batch_id = submitted(world, blobs, embedded("one", input="abc"), endpoint=EMBEDDINGS)
    batch = finished(world, FakeAgent(), batch_id)
    assert batch.state == "failed"
    assert [(error["code"], error["param"], error["line"]) for error in batch.errors["data"]] == [
        ("model_not_supported", "body.model", 1)
    ]


def responded(custom_id: str, **body: Any) -> bytes:
    asked = {"model": "tide", "input": "hi"} | body
    fields = {"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": asked}
    return msgspec.json.encode(fields) + b"\n"


def test_responses_in_a_batch_are_in_its_output_alone(world: World, blobs: BlobStore) -> None:
    lines = (responded("text"), responded("call", tools=[{"type": "function", "name": "look"}], store=True))
    call = ToolCallDelta(index=0, name="look", arguments="{}")
    agent = FakeAgent(
        events=[
            Token(text="so", token_ids=(1,), reasoning="hm"),
            Token(text="", token_ids=(2,), tool_calls=(call,)),
            Finished(finish_reason="tool_calls", prompt_tokens=7, completion_tokens=2),
        ]
    )
    batch = finished(world, agent, submitted(world, blobs, *lines, endpoint=RESPONSES))
    assert (batch.state, batch.completed, batch.failed) == ("completed", 2, 0)
    bodies = {each["custom_id"]: each["response"]["body"] for each in lines_of(blobs, batch.output_file_id)}
    assert bodies.keys() == {"text", "call"}
    for body in bodies.values():
        Response.model_validate(body)
        assert (body["status"], body["store"], body["service_tier"]) == ("completed", False, "flex")
        assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    with world.database.transaction() as session:
        assert not session.scalars(select(ResponseRow)).all()


def test_a_response_in_a_batch_continues_no_other(world: World, blobs: BlobStore) -> None:
    lines = (responded("one", previous_response_id="resp_1"), responded("two", background=True))
    batch = finished(world, FakeAgent(), submitted(world, blobs, *lines, endpoint=RESPONSES))
    assert batch.state == "failed"
    assert [(error["code"], error["param"]) for error in batch.errors["data"]] == [
        ("unsupported_parameter", "body.previous_response_id"),
        ("unsupported_parameter", "body.background"),
    ]
