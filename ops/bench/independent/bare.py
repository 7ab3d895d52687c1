"""A server that does nothing but stream: what a load generator measures of it, beyond what it says of itself, is the
load generator's own time.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from controlplane.api.metrics import Metrics
from controlplane.store.request_log import CANCELLED, OK
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.tiers import Tier

FIRST_TOKEN_S, TOKEN_S = 0.02, 0.01
_TIER = Tier.IW_N.value
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_STREAM = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[%b]%b}\n\n'
_CHOICE = b'{"index":0,"delta":{%b},"finish_reason":%b}'
_USAGE = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part]

    def words(self) -> int:
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return sum(len(text.split()) for text in texts)


class _Chat(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 1


class _Connection(asyncio.Protocol):
    """One connection: a POST is answered with a stream, a GET with the metrics, in the names of a gateway's."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        assert self._transport is not None
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        lower = head.lower()
        length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in lower else 0
        if not end or len(body) < length:
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._task = asyncio.create_task(self._answer(body, time.monotonic()))
        else:
            content = self._metrics.render()
            self._transport.write(_HEAD % b"text/plain" + b"content-length: %d\r\n\r\n%b" % (len(content), content))

    async def _answer(self, body: bytes, arrived_s: float) -> None:
        assert self._transport is not None
        chat = msgspec.json.decode(body, type=_Chat)
        tokens, prompt_tokens = chat.tokens(), sum(message.words() for message in chat.messages)
        metrics, labels, outcome = self._metrics, ("m", _TIER), CANCELLED
        metrics.streams.inc()
        try:
            self._transport.write(_STREAM)
            first_s = await self._write_tokens(tokens, arrived_s)
            if tokens > 1:
                metrics.per_token_s.labels(*labels).observe((time.monotonic() - first_s) / (tokens - 1))
            usage = _USAGE % (prompt_tokens, tokens, prompt_tokens + tokens)
            ends = (_EVENT % (_CHOICE % (b"", b'"length"'), b""), _EVENT % (b"", usage), b"data: [DONE]\n\n", b"")
            self._transport.write(b"".join(map(_chunk, ends)))
            outcome = OK
            metrics.input_tokens.labels(*labels).inc(prompt_tokens)
            metrics.output_tokens.labels(*labels).inc(tokens)
        finally:
            metrics.streams.dec()
            metrics.requests.labels(*labels, "", outcome).inc()

    async def _write_tokens(self, tokens: int, arrived_s: float) -> float:
        """Write them at their times; when the first was written."""
        assert self._transport is not None
        first_s = arrived_s
        for number in range(tokens):
            await asyncio.sleep(arrived_s + FIRST_TOKEN_S + number * TOKEN_S - time.monotonic())
            if not number:
                first_s = time.monotonic()
                self._metrics.first_token_s.labels("m", _TIER).observe(first_s - arrived_s)
            content = b'"content":"%b "' % WORDS[number % len(WORDS)].encode()
            self._transport.write(_chunk(_EVENT % (_CHOICE % (content, b"null"), b"")))
        return first_s


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """Serve from this process; yields the address."""
    metrics = Metrics()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(metrics), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
