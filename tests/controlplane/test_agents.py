"""The client to nodes: odd streams, and a limit that is its own."""

from collections.abc import AsyncIterator, Callable

import anyio
import httpx2 as httpx
import pytest

from controlplane.agents import AgentClient
from controlplane.errors import NodeError
from controlplane.policies.decisions import Route
from controlplane.policies.health import CircuitSettings
from controlplane.serving.circuits import Circuits
from controlplane.settings import Settings
from dataplane.messages import Finished, Generate, Sampling, Started, StreamEvent, Token, encode_line

EVENTS: list[StreamEvent] = [
    Started(prompt_tokens=1),
    Token(text="a", token_ids=(1,)),
    Finished(finish_reason="stop", prompt_tokens=1, completion_tokens=1),
]
REQUEST = Generate(request_id="r", instance_id="i", model="m", tier="IW-N", prompt="x", sampling=Sampling())


class Node(httpx.AsyncBaseTransport):
    """A node whose stream comes in these chunks."""

    def __init__(self, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
        self._chunks = chunks

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=self._chunks())


class NoConnectionLeft(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.PoolTimeout("all are in use")


def ask(transport: httpx.AsyncBaseTransport) -> list[StreamEvent]:
    """The events of one request."""

    async def run() -> list[StreamEvent]:
        client = AgentClient(Settings(), transport=transport)
        events = [event async for events in client.generate("http://n1", REQUEST) for event in events]
        await client.close()
        return events

    return anyio.run(run)


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b" \n"])
@pytest.mark.parametrize("before", range(len(EVENTS)))
def test_blank_lines_are_nothing(blank: bytes, before: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for number, event in enumerate(EVENTS):
            if number == before:
                yield blank
            yield encode_line(event)

    assert ask(Node(chunks)) == EVENTS


def test_a_limit_of_our_own_is_no_fault_of_the_nodes() -> None:
    with pytest.raises(NodeError) as caught:
        ask(NoConnectionLeft())
    assert (caught.value.status, caught.value.code, caught.value.retryable) == (429, "gateway_busy", True)
    circuits = Circuits(CircuitSettings())
    for _ in range(20):
        circuits.note_end(Route(instance_id="i", node_id="n", region="east", utilization=0.0), caught.value)
    assert not circuits.avoided()
