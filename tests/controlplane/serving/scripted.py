"""Nodes without a network: their answers are what a function yields."""

import asyncio
from asyncio import sleep  # tests replace that of the module
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from controlplane.serving.node_connections import NodeConnection, NodeConnections, Receiver
from dataplane.protocol.messages import Generate, StreamEvent, Token, encode_line
from dataplane.protocol.records import MEDIA_TYPE, encode_events, encode_text

Answer = Callable[[str, Generate], AsyncIterator[bytes]]
"""The pieces of a node's answer, by the node's name and the request. A ConnectionError breaks it off."""


class ScriptedConnections(NodeConnections):
    """To nodes that answer so. As records if they are asked for them, unless the nodes are `old`."""

    def __init__(self, answer: Answer, *, old: bool = False) -> None:
        self._answer = answer
        self._old = old

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, receiver: Receiver) -> NodeConnection:
        asked = msgspec.json.decode(body, type=Generate)
        assert (headers.get("accept") == MEDIA_TYPE) == (asked.text_frame is not None)
        if self._old:
            asked = msgspec.structs.replace(asked, text_frame=None)
        return _ScriptedConnection(self._answer(url.split("/")[2], asked), receiver, as_records=_is_framed(asked))

    def close(self) -> None:
        pass


class _ScriptedConnection(NodeConnection):
    def __init__(self, pieces: AsyncIterator[bytes], receiver: Receiver, *, as_records: bool) -> None:
        self._left = False
        self._resumed = asyncio.Event()
        receiver.begun(200, MEDIA_TYPE if as_records else "application/x-ndjson")
        self._task = asyncio.create_task(self._answer(pieces, receiver))

    async def _answer(self, pieces: AsyncIterator[bytes], receiver: Receiver) -> None:
        error: Exception | None = None
        try:
            async for piece in pieces:
                self._resumed.clear()
                if not receiver.received(piece):
                    await self._resumed.wait()
                await sleep(0)  # whoever waits for it goes on
        except Exception as broken:
            error = broken
        receiver.ended(error)

    def resume(self, receiver: Receiver) -> None:
        self._resumed.set()

    def leave(self, receiver: Receiver, *, at_end: bool) -> None:
        self._task.cancel()


def encoded(event: StreamEvent, asked: Generate) -> bytes:
    """An event as a node writes it to whoever asked so: a line, or a record."""
    if asked.text_frame is None:
        return encode_line(event)
    if isinstance(event, Token) and not (event.reasoning or event.tool_calls or event.logprobs):
        before, after = asked.text_frame
        payload = (before.encode() + msgspec.json.encode(event.text) + after.encode()) if event.text else b""
        return encode_text(event.token_ids, len(event.text), payload)
    return encode_events([event])


def _is_framed(asked: Generate) -> bool:
    return asked.text_frame is not None
