"""Text that goes from the node's connection to the client's without waking the request's task."""

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.serving.fan_out import InFlightQuery
from controlplane.serving.node_streams import NodeStream
from dataplane.protocol.messages import Finished, StreamEvent, Token
from dataplane.protocol.records import TextRecord
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FLOOD_TOKENS, FakeAgent, World, until

WORDS = ("the ", "naïve 🌊 ", '"quoted"', "", "\n\n</s>\\ \u2028\x00 ", "x" * 70_000, "end")
EVENTS: tuple[StreamEvent, ...] = (
    *(Token(text=word, token_ids=(number, 7)) for number, word in enumerate(WORDS)),
    Finished(finish_reason="stop", prompt_tokens=7, completion_tokens=2 * len(WORDS)),
)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent(events=EVENTS)


@pytest.fixture
def gateway(world: World, agent: FakeAgent) -> Iterator[Gateway]:
    with running_gateway(world, agent) as gateway:
        yield gateway


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that went past the events of their request."""
    counts: list[int] = []
    create = NodeStream.__init__

    def noted(self: NodeStream, *, pass_on: Any, **options: Any) -> None:
        def counted(text: TextRecord) -> bool:
            done: bool = pass_on(text)
            if done:
                counts.append(len(text.token_ids))
            return done

        create(self, pass_on=counted, **options)

    monkeypatch.setattr(NodeStream, "__init__", noted)
    return counts


def answer(gateway: Gateway, agent: FakeAgent, **body: Any) -> bytes:
    """The server-sent events of a stream, the time of its creation left out. A node whose answers are held writes text
    when the client has the head, and the end when it has the text.
    """
    asked = {"model": "tide", "stream": True, "stream_options": {"include_usage": True}} | body
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    content = b""
    with gateway.http.stream("POST", path, json=asked, headers={"x-request-id": "same"}) as got:
        assert got.status_code == 200
        agent.freed.set()
        for piece in got.iter_raw():
            content += piece
            if b'"end"' in content:
                agent.ending.set()
    agent.freed.clear()
    agent.ending.clear()
    return re.sub(rb'"created":\d+', b'"created":0', content)


@pytest.mark.parametrize("body", [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}])
def test_the_same_bytes_as_without_records(gateway: Gateway, agent: FakeAgent, passed: list[int], body: Any) -> None:
    agent.then = "held"
    fast = answer(gateway, agent, **body)
    assert agent.asked[-1].text_frame is not None
    assert sum(passed) > 0
    agent.old = True
    slow_passed = len(passed)
    slow = answer(gateway, agent, **body)
    assert len(passed) == slow_passed
    assert fast == slow
    assert b'"completion_tokens":14' in fast


def test_choices_have_frames_of_their_own(gateway: Gateway, agent: FakeAgent, passed: list[int]) -> None:
    fast = answer(gateway, agent, prompt="hi", n=3)
    assert len({asked.text_frame for asked in agent.asked}) == 3
    assert not passed, "choices wait for each other"
    agent.old = True
    slow = answer(gateway, agent, prompt="hi", n=3)
    for index in range(3):
        mark = b'"index":%d' % index
        both = [[event for event in got.split(b"\n\n") if mark in event] for got in (fast, slow)]
        assert both[0] == both[1]


def test_other_shapes_ask_for_no_records(gateway: Gateway, agent: FakeAgent) -> None:
    assert gateway.chat().json()["choices"][0]["message"]["content"] == "".join(WORDS)
    assert agent.asked[-1].text_frame is None
    gateway.client.responses.create(model="tide", input="hi", stream=True).close()
    until(lambda: len(agent.asked) == 2)
    assert agent.asked[-1].text_frame is None


def test_old_clients_read_until_the_end(gateway: Gateway, agent: FakeAgent, passed: list[int]) -> None:
    """HTTP/1.0 knows no chunks."""
    client = gateway.connect(version="1.0")
    with client.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")
    assert not passed


def test_who_does_not_read_holds_its_node_and_nobody_else(gateway: Gateway, agent: FakeAgent) -> None:
    agent.script = ["flood"]
    slow = gateway.connect()
    assert slow.recv(10).startswith(b"HTTP/1.1 2")
    seen = -1
    while seen != agent.flooded or not seen:  # it stops to send
        seen = agent.flooded
        for _ in range(3):
            assert answer(gateway, agent, prompt="hi").endswith(b"data: [DONE]\n\n"), "others are answered meanwhile"
    assert agent.flooded < FLOOD_TOKENS / 3
    read_bytes = 0
    while agent.flooded == seen:  # it goes on where the client does
        read_bytes += len(slow.recv(2**20))
    assert read_bytes > 0
    slow.close()
    until(agent.dropped.is_set)
    assert agent.flooded < FLOOD_TOKENS


def test_a_client_that_leaves_cancels_at_its_node(gateway: Gateway, agent: FakeAgent, passed: list[int]) -> None:
    agent.script = ["hang later"]
    client = gateway.connect()
    received = b""
    while b"the tide" not in received:
        received += client.recv(1000)
    client.close()
    until(agent.dropped.is_set)
    assert answer(gateway, agent, prompt="hi").endswith(b"data: [DONE]\n\n"), "others are answered"


def test_a_failure_is_the_last_event(gateway: Gateway, agent: FakeAgent, passed: list[int]) -> None:
    agent.script = ["fail later"] * 9
    last = answer(gateway, agent, prompt="hi").split(b"\n\n")[-2]
    assert b'"code":"worker_lost"' in last


def test_a_query_that_has_ended_waits_for_no_collection_of_garbage(gateway: Gateway, agent: FakeAgent) -> None:
    """It holds the prompt."""

    def queries() -> list[InFlightQuery]:
        return [each for each in gc.get_objects() if type(each) is InFlightQuery]

    agent.then = "held"
    gc.collect()
    gc.disable()
    try:
        answer(gateway, agent, prompt="hi")
        until(lambda: not queries())
        assert not queries()
    finally:
        gc.enable()
