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
from ops.bench.streaming import StreamingConnection, chunk

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


class _Connection(StreamingConnection):
    """One connection: a POST is answered with a stream, a GET with the metrics, in the names of a gateway's."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def got(self) -> bytes:
        content = self._metrics.render()
        return _HEAD % b"text/plain" + b"content-length: %d\r\n\r\n%b" % (len(content), content)

    async def stream(self, path: bytes, body: bytes) -> None:
        arrived_s = time.monotonic()
        chat = msgspec.json.decode(body, type=_Chat)
        tokens, prompt_tokens = chat.tokens(), sum(message.words() for message in chat.messages)
        metrics, labels, outcome = self._metrics, ("m", _TIER), CANCELLED
        metrics.streams.inc()
        try:
            self.write(_STREAM)
            first_s = await self._write_tokens(tokens, arrived_s)
            if tokens > 1:
                metrics.per_token_s.labels(*labels).observe((time.monotonic() - first_s) / (tokens - 1))
            usage = _USAGE % (prompt_tokens, tokens, prompt_tokens + tokens)
            ends = (_EVENT % (_CHOICE % (b"", b'"length"'), b""), _EVENT % (b"", usage), b"data: [DONE]\n\n", b"")
            self.write(b"".join(map(chunk, ends)))
            outcome = OK
            metrics.input_tokens.labels(*labels).inc(prompt_tokens)
            metrics.output_tokens.labels(*labels).inc(tokens)
        finally:
            metrics.streams.dec()
            metrics.requests.labels(*labels, "", outcome).inc()

    async def _write_tokens(self, tokens: int, arrived_s: float) -> float:
        """Write them at their times; when the first was written."""
        first_s = arrived_s
        for number in range(tokens):
            await asyncio.sleep(arrived_s + FIRST_TOKEN_S + number * TOKEN_S - time.monotonic())
            if not number:
                first_s = time.monotonic()
                self._metrics.first_token_s.labels("m", _TIER).observe(first_s - arrived_s)
            content = b'"content":"%b "' % WORDS[number % len(WORDS)].encode()
            self.write(chunk(_EVENT % (_CHOICE % (content, b"null"), b"")))
        return first_s


@asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """Serve from this process; yields the address."""
    metrics = Metrics()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(metrics), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
