"""Streams of a node under test, read to their end or left in the middle."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

import msgspec

from dataplane.protocol.messages import Failed, Generate, StreamEvent, Token, decode_lines
from tests.dataplane.replay_node import Node


def token_ids(events: Iterable[StreamEvent]) -> list[int]:
    return [token_id for event in events if isinstance(event, Token) for token_id in event.token_ids]


def kill(node: Node, kind: str, *, at_work: bool = True) -> bool:
    """Kill a worker of this kind, with `at_work` only one whose instances are ready; False when there is none.

    One that dies while it starts or loads, time and again, is another story: its instances fail for a while.
    """
    for worker in node.agent.workers:
        ready = not at_work or all(worker.is_ready(report.instance_id) for report in node.agent.reports())
        if worker.kind == kind and worker.pid is not None and ready:
            os.kill(worker.pid, signal.SIGKILL)
            return True
    return False


async def stream(
    node: Node, body: Generate, on_admitted: Callable[[], None] = lambda: None
) -> AsyncGenerator[StreamEvent, None]:
    """The events of a stream, or its refusal."""
    async with node.client.stream("POST", "/generate", content=msgspec.json.encode(body)) as response:
        if response.status_code != 200:
            yield msgspec.json.decode(await response.aread(), type=Failed)
            return
        on_admitted()
        async for line in response.aiter_lines():
            yield decode_lines(line.encode())[0]


async def read(
    node: Node, body: Generate, *, events_max: int | None = None, kill_at: int | None = None, kind: str = "both"
) -> list[StreamEvent]:
    """The events of a stream, or its refusal. The client leaves after `events_max` events, a worker dies after
    `kill_at` tokens: events have several tokens where they are read late.
    """
    events: list[StreamEvent] = []
    killed = kill_at is None
    async with aclosing(stream(node, body)) as streamed:
        async for event in streamed:
            events.append(event)
            if not killed and len(token_ids(events)) >= (kill_at or 0):
                killed = True
                kill(node, kind)
            if len(events) == events_max:
                break
    return events


async def read_together(
    node: Node, bodies: Sequence[Generate], *, kill_at: tuple[int, int] | None = None, kind: str = "both"
) -> list[list[StreamEvent]]:
    """The events of several streams at once. `kill_at`: the place of a stream, and how many of its tokens have come
    when a worker dies; but only once the node has admitted all of them, since it refuses requests until the worker is
    back.
    """
    admitted: set[int] = set()
    killed = kill_at is None

    async def read_one(place: int, body: Generate) -> list[StreamEvent]:
        nonlocal killed
        events: list[StreamEvent] = []
        async with aclosing(stream(node, body, lambda: admitted.add(place))) as streamed:
            async for event in streamed:
                events.append(event)
                if kill_at and not killed and place == kill_at[0] and len(token_ids(events)) >= kill_at[1]:
                    killed = True
                    await node.until(lambda: len(admitted) == len(bodies))
                    assert kill(node, kind)
        return events

    answers = await asyncio.gather(*(read_one(place, body) for place, body in enumerate(bodies)))
    assert killed, f"the stream had fewer than {kill_at} tokens"
    return answers
