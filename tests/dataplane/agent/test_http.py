"""A node with real worker processes: streams, refusals, vanished clients, killed workers, draining."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from dataplane.agent.http import make_app
from dataplane.agent.node import Agent
from dataplane.protocol.errors import StaleGenerationError
from dataplane.protocol.messages import (
    ChatMessage,
    Failed,
    Finished,
    Sampling,
    Started,
    StreamEvent,
    Token,
)
from tests.dataplane.replay_node import KEY, Node, desired, generate, instance, running_node, settings
from tests.dataplane.streams import kill, read, stream, token_ids
from tests.event_loop import asynchronous


def text(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


@asynchronous
async def test_streams_stops_and_counts() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        events = await read(node, generate(max_tokens=20))
        assert events[0] == Started(prompt_tokens=3)
        assert events[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=20)
        words = text(events).split()
        assert len(words) == len(token_ids(events)) == 20

        stop = Sampling(max_tokens=20, temperature=0.0, stop=(words[5] + " " + words[6],))
        stopped = await read(node, generate("r2", sampling=stop))
        assert text(stopped).split() == words[:5]
        assert stopped[-1] == Finished(finish_reason="stop", prompt_tokens=3, completion_tokens=7)
        await node.until(node.idle)

        chat = generate("r3", max_tokens=2, prompt=None, messages=(ChatMessage(role="user", content="the sea"),))
        assert (await read(node, chat))[0] == Started(prompt_tokens=4)
        unbounded = generate("r4", max_tokens=None, prompt=None, prompt_tokens=(1,) * 2000)
        # 1 MiB of KV at 512 bytes a token holds 2048 tokens
        finished = Finished(finish_reason="length", prompt_tokens=2000, completion_tokens=48)
        assert (await read(node, unbounded))[-1] == finished
        await check_views(node)


async def check_views(node: Node) -> None:
    await node.until(lambda: node.idle() and node.agent.switches_total == 1)
    metrics = (await node.client.get("/metrics")).text
    assert 'vllm:num_requests_running{model_name="tide"} 0.0' in metrics
    assert 'vllm:prompt_tokens_total{model_name="tide"} 2010.0' in metrics
    assert 'vllm:generation_tokens_total{model_name="tide"} 77.0' in metrics
    assert 'vllm:request_success_total{finished_reason="error",model_name="tide"} 0.0' in metrics, "before the first"
    assert "tidepool_load_seconds_total 0.0" in metrics
    assert "tidepool_switches_total 1.0" in metrics
    state = (await node.client.get("/state")).json()
    assert state["heartbeat"]["instances"][0]["state"] == "ready"
    assert state["slots"][0]["in_flight"] == 0
    assert (await node.client.get("/livez", headers={"authorization": ""})).status_code == 200


@asynchronous
async def test_an_agent_is_ready_once_what_it_shall_hold_is_loaded() -> None:
    async with running_node(settings()) as node:

        async def ready() -> int:
            return (await node.client.get("/readyz", headers={"authorization": ""})).status_code

        assert await ready() == 503, "it has not been told anything"
        node.agent.apply(desired(1, instance()))
        assert await ready() == 503, "its instance is loading"
        await node.until(lambda: node.states() == {"i1": "ready"})
        assert await ready() == 200
        node.agent.apply(desired(2, instance(), instance("later")))
        assert await ready() == 200, "what comes later says nothing of its start"
    async with running_node(settings()) as node:
        await node.hold(0)
        assert (await node.client.get("/readyz")).status_code == 200, "nothing is to be there"


@asynchronous
async def test_refusals_are_failed_messages_with_their_status() -> None:
    cases: list[tuple[dict[str, Any], int, str, str | None]] = [
        ({"instance_id": "other"}, 409, "instance_not_ready", "instance_id"),
        ({"model": "another"}, 400, "invalid_value", "model"),
        ({"prompt": ""}, 400, "invalid_value", "prompt"),
        ({"prompt_tokens": (1,)}, 400, "invalid_value", "messages"),
        ({"prompt": None, "prompt_tokens": (99999,)}, 400, "invalid_value", "prompt_tokens"),
        ({"sampling": Sampling(max_tokens=0)}, 400, "invalid_value", "max_tokens"),
        ({"sampling": Sampling(temperature=-0.1)}, 400, "invalid_value", "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, 400, "invalid_value", "top_p"),
        ({"sampling": Sampling(stop=("",))}, 400, "invalid_value", "stop"),
        ({"sampling": Sampling(frequency_penalty=2.1)}, 400, "invalid_value", "frequency_penalty"),
        ({"sampling": Sampling(logit_bias=((99999, 1.0),))}, 400, "invalid_value", "logit_bias"),
        ({"sampling": Sampling(max_tokens=5000)}, 400, "context_length_exceeded", "max_tokens"),
        ({"prompt": "the " * 3000, "sampling": Sampling()}, 400, "context_length_exceeded", "prompt"),
    ]
    async with running_node(settings(body_bytes_max=20_000)) as node:
        await node.hold(1, instance())
        for changes, status, code, param in cases:
            response = await node.post(generate(**changes))
            failed = msgspec.json.decode(response.content, type=Failed)
            assert (response.status_code, failed.status, failed.code, failed.param) == (status, status, code, param)
            assert failed.retryable == (status == 409)
        for content in (b"{}", b"no json", b'{"tools":' + b"[" * 15_000, b'{"prompt":"\xe9"}'):
            assert (await node.client.post("/generate", content=content)).status_code == 400
        assert (await node.client.post("/generate", content=b'"' + b"x" * 30_000)).status_code == 413
        for key in ("", "Bearer wrong", "Bearer é"):
            headers = {b"authorization": key.encode()}
            for response in (
                await node.client.post("/generate", content=b"{}", headers=headers),
                await node.client.get("/state", headers=headers),
            ):
                assert response.status_code == 401


@asynchronous
async def test_a_full_queue_refuses_and_a_vanished_client_frees_its_request() -> None:
    async with running_node(settings(queue_max=1)) as node:
        await node.hold(1, instance())
        assert isinstance((await read(node, generate("long", max_tokens=2000), events_max=2))[-1], Token)
        await node.until(node.idle)

        long = stream(node, generate("long again", max_tokens=2000))
        assert isinstance(await anext(long), Started)
        refused = await node.post(generate("one too many"))
        assert refused.status_code == 429
        assert msgspec.json.decode(refused.content, type=Failed).retryable
        await long.aclose()
        await node.until(lambda: node.in_flight() == 0)
        assert isinstance((await read(node, generate("next")))[-1], Finished)


@asynchronous
async def test_a_killed_worker_is_replaced_and_its_streams_go_on() -> None:
    async with running_node() as node:
        await node.hold(1, instance(), instance("i2", name="ebb"))
        sampled = Sampling(max_tokens=300, temperature=1.0, seed=11)
        undisturbed = token_ids(await read(node, generate("calm", sampling=sampled)))
        await node.until(lambda: node.agent.switches_total == 1)
        killed = node.agent.workers[0].pid
        events = await read(node, generate("storm", sampling=sampled), kill_at=20)
        assert token_ids(events) == undisturbed
        assert events[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=300)
        assert node.agent.workers[0].pid not in (None, killed)
        assert node.agent.workers[0].restarts_total == 1
        await node.until(lambda: node.states() == {"i1": "ready", "i2": "ready"})
        await node.until(lambda: node.agent.switches_total == 2)  # those of the lost worker still count


@asynchronous
async def test_a_request_that_loses_too_many_workers_fails() -> None:
    async with running_node(settings(worker_losses_max=0)) as node:
        await node.hold(1, instance())
        last = (await read(node, generate("doomed", max_tokens=2000), kill_at=3))[-1]
        assert isinstance(last, Failed)
        assert (last.status, last.code, last.retryable) == (503, "worker_lost", True)


@asynchronous
async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running_node() as node:
        await node.hold(1, instance(), instance("i2", name="ebb"))
        async for event in stream(node, generate("last", max_tokens=1000)):
            last = event
            if isinstance(event, Started):
                node.agent.apply(desired(2, instance(draining=True), instance("i2", name="ebb")))
                assert node.states()["i1"] == "draining"
                assert (await node.post(generate("late"))).status_code == 409
        assert last == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=1000)
        await node.until(lambda: node.states() == {"i2": "ready"})
        with pytest.raises(StaleGenerationError):
            node.agent.apply(desired(1))
        await node.hold(3, instance(), instance("i2", name="ebb"))
        assert isinstance((await read(node, generate("back again")))[-1], Finished)
        node.agent.apply(desired(4, instance("i3", draining=True)))
        assert node.states() == {}, "what shall only drain is not loaded for it"


@asynchronous
async def test_a_stream_of_a_draining_instance_goes_on_after_its_worker_was_lost() -> None:
    async with running_node() as node:
        await node.hold(1, instance(), instance("i2", name="ebb"), instance("i3", name="flood"))
        worker, events = node.agent.workers[0], []
        killed = worker.pid
        async for event in stream(node, generate("last", max_tokens=2000)):
            events.append(event)
            if worker.pid == killed and len(token_ids(events)) >= 20:
                ebb = instance("i2", name="ebb", draining=True)
                node.agent.apply(desired(2, instance(draining=True), ebb, instance("i3", name="flood")))
                await node.until(lambda: node.states() == {"i1": "draining", "i3": "ready"})
                kill(node, "both")
                await node.until(lambda: node.states() == {"i1": "loading", "i3": "loading"})
        assert events[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=2000)
        assert len(token_ids(events)) == 2000
        assert worker.pid not in (None, killed)
        await node.until(lambda: node.states() == {"i3": "ready"})


@asynchronous
async def test_a_draining_instance_is_not_loaded_again_where_another_has_drained() -> None:
    async with running_node() as node:
        await node.hold(1, instance(), instance("i2", name="ebb"))
        async for event in stream(node, generate("last", max_tokens=1000)):
            last = event
            if isinstance(event, Started):
                node.agent.apply(desired(2, instance(draining=True), instance("i2", name="ebb", draining=True)))
                await node.until(lambda: node.states() == {"i1": "draining"})
        assert last == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=1000)


@asynchronous
async def test_removal_ends_streams_and_a_changed_model_is_loaded_anew() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        async for event in stream(node, generate("cut", max_tokens=2000)):
            if isinstance(event, Started):
                node.agent.apply(desired(2, instance(name="flood")))
            last = event
        assert isinstance(last, Failed)
        assert (last.status, last.retryable) == (409, True)
        await node.until(lambda: node.states() == {"i1": "ready"})
        assert isinstance((await read(node, generate("new", model="flood")))[-1], Finished)


@asynchronous
async def test_a_failed_load_is_reported_and_tried_again(tmp_path: Path) -> None:
    async with running_node() as node:
        broken = tmp_path / "tokenizer.json"
        broken.write_text("{}")
        wanted = (
            instance("big", name="big", weights_bytes=10**12),
            instance("broken", name="broken", path=str(tmp_path)),
            instance("far", slot=3),
            instance(),
        )
        node.agent.apply(desired(1, *wanted))
        states = {"big": "failed", "broken": "failed", "far": "failed", "i1": "ready"}
        await node.until(lambda: node.states() == states)
        errors = {report.instance_id: report.error or "" for report in node.agent.reports()}
        assert "weights_bytes" in errors["big"]
        assert "tokenizer" in errors["broken"]
        assert "slot 3" in errors["far"]
        broken.unlink()
        await node.until(lambda: node.states()["broken"] == "ready")
        assert isinstance((await read(node, generate()))[-1], Finished)


@asynchronous
async def test_a_worker_that_cannot_start_fails_its_instances(tmp_path: Path) -> None:
    async with running_node(settings(profile=tmp_path / "missing.toml", load_retry_s=60)) as node:
        node.agent.apply(desired(1, instance()))
        await node.until(lambda: node.states() == {"i1": "failed"})
        (report,) = node.agent.reports()
        assert "ended at their start" in (report.error or "")


@asynchronous
async def test_a_client_that_is_gone_before_its_body_is_no_fault() -> None:
    app, sent = make_app(Agent(settings(), boot_id="boot")), list[Message]()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    for path in ("/hosts", "/generate"):
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await app(scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [499, 499]
