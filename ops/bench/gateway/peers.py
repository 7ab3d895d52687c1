"""The other processes of the gateway's benchmark, as thin as Python allows.

`upstream PORT TOKENS SECONDS` answers as a node agent (`/generate`) and as an OpenAI server (`/v1/...`): so many tokens
with so many seconds between them, whose text is the time of writing in nanoseconds. Of a request with tools, the node's
text is arguments of a tool call; of one that asks for log probabilities, each token has them. To a reader of records it
writes records. `hop PORT UPSTREAM_URL` is the gateway's baseline: Starlette and aiohttp that forward bytes unread.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator

import aiohttp
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from dataplane.protocol.messages import (
    Finished,
    Sampling,
    Started,
    StreamEvent,
    Token,
    TokenLogprob,
    ToolCallDelta,
    ToolUse,
    TopLogprob,
    encode_line,
)
from dataplane.protocol.records import MEDIA_TYPE, encode_events, encode_text
from ops.bench.streaming import StreamingConnection, chunk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
_RECORDS_HEAD = HEAD.replace(b"application/x-ndjson", MEDIA_TYPE.encode())
_OPENAI_HEAD = HEAD.replace(b"application/x-ndjson", b"text/event-stream")
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_OPENAI_CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"tide","choices":[{"index":0,"delta":'
    b'{"content":"%d "},"finish_reason":null}]}\n\n'
)
_OPENAI_END = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"tide","choices":[{"index":0,"delta":{},'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":%d}}\n\n'
    b"data: [DONE]\n\n"
)
_WORD = TopLogprob(7, " tide", tuple(b" tide"), -1.25)


class _Asked(msgspec.Struct):
    """What the answer depends on: of a message to a node, not of a client's own body, which a bare hop forwards."""

    sampling: Sampling = Sampling()
    tools: ToolUse | None = None
    text_frame: tuple[str, str] | None = None


def _token(number: int, asked: _Asked) -> Token:
    """A token whose text, or whose piece of arguments, is the time."""
    text, token_ids = f"{time.monotonic_ns()} ", (number % 100,)
    top = asked.sampling.logprobs
    logprobs = () if top is None else (TokenLogprob(_WORD, (_WORD,) * top),)
    if asked.tools is None:
        return Token(text=text, token_ids=token_ids, logprobs=logprobs)
    call = ToolCallDelta(index=0, name=None if number else asked.tools.tools[0].name, arguments=text)
    return Token(text="", token_ids=token_ids, logprobs=logprobs, tool_calls=(call,))


def _encoded(event: StreamEvent, asked: _Asked) -> bytes:
    """An event as the reader wants it: a line or a record."""
    if asked.text_frame is None:
        return encode_line(event)
    if isinstance(event, Token) and not event.tool_calls and not event.logprobs:
        before, after = asked.text_frame
        payload = before.encode() + msgspec.json.encode(event.text) + after.encode()
        return encode_text(event.token_ids, len(event.text), payload)
    return encode_events([event])


class Upstream(StreamingConnection):
    """One connection: every POST gets the same stream, and every GET, as a router asks for health, an empty object."""

    def __init__(self, tokens: int, every_s: float) -> None:
        super().__init__()
        self._tokens = tokens
        self._every_s = every_s

    def got(self) -> bytes:
        return _EMPTY

    async def stream(self, path: bytes, body: bytes) -> None:
        await (self._openai() if path.startswith(b"/v1/") else self._generate(body))

    async def _generate(self, body: bytes) -> None:
        asked = msgspec.json.decode(body, type=_Asked)
        as_records = asked.text_frame is not None
        self.write((_RECORDS_HEAD if as_records else HEAD) + chunk(_encoded(Started(prompt_tokens=3), asked)))
        for number in range(self._tokens):
            await asyncio.sleep(self._every_s)
            self.write(chunk(_encoded(_token(number, asked), asked)))
        end = Finished(finish_reason="length", prompt_tokens=3, completion_tokens=self._tokens)
        self.write(chunk(_encoded(end, asked)) + b"0\r\n\r\n")

    async def _openai(self) -> None:
        self.write(_OPENAI_HEAD)
        for _ in range(self._tokens):
            await asyncio.sleep(self._every_s)
            self.write(chunk(_OPENAI_CHUNK % time.monotonic_ns()))
        self.write(chunk(_OPENAI_END % (self._tokens, self._tokens + 3)) + b"0\r\n\r\n")


def make_hop(upstream: str) -> Starlette:
    """Forwards any POST to `upstream`/generate, and streams the answer back."""
    clients: list[aiohttp.ClientSession] = []

    async def forward(request: Request) -> StreamingResponse:
        answer = await clients[0].post(f"{upstream}/generate", data=await request.body())

        async def body() -> AsyncGenerator[bytes, None]:
            async with answer:
                async for data in answer.content.iter_any():
                    yield data

        return StreamingResponse(body(), media_type=answer.headers["content-type"])

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=60)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2000), timeout=timeout) as client:
            clients.append(client)
            yield

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)


async def serve(port: int, tokens: int, every_s: float) -> None:
    """Answer until cancelled."""
    server = await asyncio.get_running_loop().create_server(lambda: Upstream(tokens, every_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    kind, port, *rest = sys.argv[1:]
    if kind == "hop":
        uvicorn.run(make_hop(rest[0]), host="127.0.0.1", port=int(port), log_level="warning", access_log=False)
    else:
        asyncio.run(serve(int(port), int(rest[0]), float(rest[1])))
