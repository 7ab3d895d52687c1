"""A node of prefill and decode workers: its streams are those of one worker, when workers die and clients leave too."""

import asyncio
import random
import time
from typing import Any

import pytest

from dataplane.agent.settings import AgentSettings
from dataplane.protocol.messages import DesiredInstance, Failed, Finished, Generate, Sampling
from tests.dataplane.replay_node import Node, desired, generate, instance, running_node, settings, workers
from tests.dataplane.streams import kill, read, read_together, token_ids
from tests.event_loop import asynchronous

INSTANCES = (instance(), instance("i2", name="ebb"))
MODELS = {"i1": "tide", "i2": "ebb"}
SOAK_S = 6.0


def split(count: int, **changes: Any) -> AgentSettings:
    return settings(
        slots=workers(*[1] * count), split=True, worker_losses_max=1000, worker_backoff_max_s=0.2, **changes
    )


def body(number: int, instance_id: str = "i1", **changes: Any) -> Generate:
    sampling = Sampling(max_tokens=40 + 7 * (number % 5), temperature=1.0, seed=number)
    values = {"instance_id": instance_id, "model": MODELS[instance_id], "sampling": sampling} | changes
    return generate(f"r{number}-{instance_id}-{time.monotonic_ns()}", **values)


def bodies(count: int) -> list[Generate]:
    return [body(number, instance_id) for number in range(count) for instance_id in MODELS]


def same_request(one: Generate) -> tuple[str, int | None]:
    return one.instance_id, one.sampling.seed


async def calm_answers(count: int) -> dict[tuple[str, int | None], list[int]]:
    """The tokens of a node with one worker."""
    async with running_node() as node:
        alone = tuple(DesiredInstance(instance_id=i.instance_id, slot=0, gpus=1, model=i.model) for i in INSTANCES)
        await node.hold(1, *alone)
        wanted = bodies(count)
        answers = await read_together(node, wanted)
        return {same_request(one): token_ids(events) for one, events in zip(wanted, answers, strict=True)}


@asynchronous
async def test_streams_equal_those_of_one_worker() -> None:
    calm = await calm_answers(5)
    async with running_node(split(3, prefill_ratio=0.3)) as node:
        assert [worker.kind for worker in node.agent.workers] == ["prefill", "decode", "decode"]
        await hold_on_every_worker(node)
        assert [report.slot for report in node.agent.reports()] == [0, 0], "one report for each instance"
        wanted = bodies(5)
        answers = await read_together(node, wanted)
        for one, events in zip(wanted, answers, strict=True):
            assert token_ids(events) == calm[same_request(one)]
            tokens = one.sampling.max_tokens or 0
            assert events[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=tokens)
        await node.until(node.idle)
        await check_views(node, handovers=len(wanted))


@asynchronous
async def test_workers_that_do_both_serve_together() -> None:
    """Streams are those of one worker; each worker hosts both instances, and both run requests."""
    calm = await calm_answers(5)
    async with running_node(settings(slots=workers(1, 1), together=True)) as node:
        assert [worker.kind for worker in node.agent.workers] == ["both", "both"]
        await hold_on_every_worker(node)
        assert [report.slot for report in node.agent.reports()] == [0, 0], "one report for each instance"
        wanted = bodies(5)
        answers = await read_together(node, wanted)
        for one, events in zip(wanted, answers, strict=True):
            assert token_ids(events) == calm[same_request(one)]
        await node.until(node.idle)
        state = await state_with_turns(node)
        assert [(pool["slots"], pool["handovers_total"]) for pool in state["pools"]] == [([0, 1], 0)]
        assert "prefill" in {turn["kind"] for turn in state["slots"][1]["pool"]["turns"]}, "both workers run requests"


async def hold_on_every_worker(node: Node) -> None:
    """Wait until both instances are ready on all workers; requests are taken as soon as they are on one."""
    await node.hold(1, *INSTANCES)
    await node.until(lambda: all(worker.is_ready(one) for worker in node.agent.workers for one in MODELS))


async def state_with_turns(node: Node) -> dict[str, Any]:
    """The node's state once every worker has reported time slices, which it does at intervals."""
    async with asyncio.timeout(60):
        while True:
            state: dict[str, Any] = (await node.client.get("/state")).json()
            if all(slot["pool"] and slot["pool"]["turns"] for slot in state["slots"][:2]):
                return state
            await asyncio.sleep(0.05)


async def check_views(node: Node, handovers: int) -> None:
    state = await state_with_turns(node)
    assert state["pools"] == [
        {
            "slots": [worker.index for worker in node.agent.workers],
            "in_flight": 0,
            "waiting_for_a_slot": 0,
            "handovers_total": handovers,
        }
    ]
    prefill, *decodes = state["slots"]
    assert {turn["kind"] for turn in prefill["pool"]["turns"]} == {"prefill"}
    assert prefill["prefill_groups"] == []
    turns = [turn for slot in decodes for turn in slot["pool"]["turns"]]
    assert {turn["kind"] for turn in turns} == {"decode"}
    assert all(turn["started_age_s"] >= turn["ended_age_s"] >= 0 for turn in turns)
    metrics = (await node.client.get("/metrics")).text
    assert f"tidepool_handovers_total {handovers}.0" in metrics
    assert 'tidepool_slot_load{kind="decode",slot="1"}' in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="tide"}' in metrics


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@asynchronous
async def test_a_killed_worker_loses_nothing(kind: str) -> None:
    calm = await calm_answers(5)
    chance = random.Random(kind)
    async with running_node(split(2)) as node:
        await node.hold(1, *INSTANCES)
        for losses in (1, 2):
            wanted = bodies(5)
            kill_at = chance.randrange(len(wanted)), chance.randrange(1, 30)
            answers = await read_together(node, wanted, kill_at=kill_at, kind=kind)
            for one, events in zip(wanted, answers, strict=True):
                assert token_ids(events) == calm[same_request(one)]
            await node.until(lambda losses=losses: _restarts(node) == losses)  # a loss is not noticed at once
            await node.until(lambda: set(node.states().values()) == {"ready"})
        await node.until(node.idle)
        assert _restarts(node) == 2


def _restarts(node: Node) -> int:
    return sum(worker.restarts_total for worker in node.agent.workers)


@asynchronous
async def test_a_client_that_leaves_frees_both_sides() -> None:
    async with running_node(split(2)) as node:
        await node.hold(1, *INSTANCES)
        endless = Sampling(max_tokens=1500, temperature=0.0)
        for events_max in range(1, 8):
            assert len(await read(node, body(events_max, sampling=endless), events_max=events_max)) == events_max
            await node.until(node.idle)


@asynchronous
async def test_an_instance_is_ready_when_each_kind_of_worker_has_it() -> None:
    async with running_node(split(2)) as node:
        await node.hold(1, *INSTANCES)
        events = await read(
            node, body(1, sampling=Sampling(max_tokens=900, temperature=0.0)), kill_at=20, kind="decode"
        )
        assert len(token_ids(events)) == 900
        assert kill(node, "prefill")
        await node.until(lambda: node.states()["i1"] == "loading")
        assert (await node.post(body(2))).status_code == 503
        await node.until(lambda: node.states()["i1"] == "ready")

        draining = asyncio.create_task(read(node, body(3, sampling=Sampling(max_tokens=900, temperature=0.0))))
        await node.until(lambda: node.in_flight() == 1)
        node.agent.apply(desired(2, instance(draining=True), INSTANCES[1]))
        assert isinstance((await draining)[-1], Finished)
        await node.until(lambda: node.states() == {"i2": "ready"})

        cut = asyncio.create_task(read(node, body(4, "i2", sampling=Sampling(max_tokens=1500, temperature=0.0))))
        await node.until(lambda: node.in_flight() == 1)
        node.agent.apply(desired(3))
        assert isinstance((await cut)[-1], Failed)
        assert node.states() == {}
        await node.until(node.idle)


@pytest.mark.slow
@asynchronous
async def test_a_soak_of_leaving_clients_and_dying_workers() -> None:
    async def client(node: Node, chance: random.Random, calm: dict[Any, list[int]], ends_s: float) -> int:
        whole = 0
        while time.monotonic() < ends_s:
            await node.until(lambda: set(node.states().values()) == {"ready"})
            one = chance.choice(bodies(5))
            events_max = chance.choice((None, chance.randrange(1, 40)))
            events = await read(node, one, events_max=events_max)
            if isinstance(events[0], Failed):
                assert events[0].status == 503, "a worker was lost just now"
                continue
            made, expected = token_ids(events), calm[same_request(one)]
            assert made == expected[: len(made)]
            if isinstance(events[-1], Finished):
                assert made == expected
                whole += 1
            else:
                assert len(events) == events_max, events[-1]
        return whole

    async def killer(node: Node, chance: random.Random, ends_s: float) -> int:
        kills = 0
        while time.monotonic() < ends_s:
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            kills += kill(node, chance.choice(("prefill", "decode")))
        return kills

    calm = await calm_answers(5)
    async with running_node(split(3, prefill_ratio=0.3)) as node:
        await node.hold(1, *INSTANCES)
        ends_s = time.monotonic() + SOAK_S
        clients = (client(node, random.Random(seed), calm, ends_s) for seed in range(6))
        kills, *whole = await asyncio.gather(killer(node, random.Random(99), ends_s), *clients)
        assert kills > 0
        assert sum(whole) > 0
        await node.until(lambda: set(node.states().values()) == {"ready"})
        await node.until(node.idle)
