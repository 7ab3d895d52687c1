"""Streams of tokens by HTTP, timed by one client that speaks to an agent and to a server of OpenAI's API alike.

All requests of a draw are sent at once, each on a connection of its own. A gap is the time between two pieces of one
stream that carry tokens; a piece may carry several.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle, pairwise
from typing import Any, Literal

import httptools
import msgspec

from dataplane.protocol.messages import Failed, Generate, Sampling, StreamEvent, Token
from dataplane.protocol.tiers import Tier
from ops.profiling.checkpoints import VOCABULARY

Prompt = tuple[int, ...]
TokensOf = Callable[[bytes], Sequence[int]]
_EVENTS: msgspec.json.Decoder[StreamEvent] = msgspec.json.Decoder(StreamEvent)


class StreamError(Exception):
    """A server refused a request, or its answer is not as long as was asked for."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where requests go: `agent` takes Tidepool's own, for one `instance`; `openai` takes completions, whose answers
    name their token ids. `key`: sent as a bearer token.
    """

    api: Literal["agent", "openai"]
    port: int
    key: str
    model: str
    instance: str = ""

    def request(self, request_id: str, prompt: Prompt, *, max_tokens: int, temperature: float) -> bytes:
        """A request for so many tokens, whatever they are."""
        if self.api == "agent":
            path, body = "/generate", _generate(self, request_id, prompt, max_tokens, temperature)
        else:
            path, body = "/v1/completions", _completion(self.model, prompt, max_tokens, temperature)
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    @property
    def tokens_of(self) -> TokensOf:
        """The tokens that a line of an answer carries."""
        return _line_tokens if self.api == "agent" else _chunk_tokens


def _generate(server: Server, request_id: str, prompt: Prompt, max_tokens: int, temperature: float) -> bytes:
    return msgspec.json.encode(
        Generate(
            request_id=request_id,
            instance_id=server.instance,
            model=server.model,
            tier=Tier.IW_N,
            prompt_tokens=prompt,
            sampling=Sampling(max_tokens=max_tokens, temperature=temperature, ignore_eos=True),
        )
    )


def _completion(model: str, prompt: Prompt, max_tokens: int, temperature: float) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )


def _line_tokens(line: bytes) -> Sequence[int]:
    event = _EVENTS.decode(line)
    if isinstance(event, Failed):
        raise StreamError(event.message)
    return event.token_ids if isinstance(event, Token) else ()


def _chunk_tokens(line: bytes) -> Sequence[int]:
    name, _, data = line.partition(b": ")
    if name != b"data" or data == b"[DONE]":
        return ()
    return [token for choice in _CHUNKS.decode(data).choices for token in choice.token_ids or ()]


@dataclass(eq=False, kw_only=True)
class Stream:
    """One answer: its tokens, and when the pieces came that carried them."""

    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.pieces_s)]


class _Connection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, request: bytes, tokens_of: TokensOf) -> None:
        self._request = request
        self._tokens_of = tokens_of
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now_s = 0.0
        self.ended: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._stream = Stream(sent_s=time.perf_counter())
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except Exception as error:  # whatever is wrong with an answer, its reader is told
            self._end(error)

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            raise StreamError(f"status {self._parser.get_status_code()}: {body.decode(errors='replace')[:500]}")
        *lines, self._rest = (self._rest + body).split(b"\n")
        tokens = [token for line in lines if line for token in self._tokens_of(line)]
        if tokens:
            self._stream.pieces_s.append(self._now_s)
            self._stream.tokens += tokens

    def on_message_complete(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or StreamError("the server closed the connection"))

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(self._stream)
            else:
                self.ended.set_exception(error.__context__ or error)
        self._transport.close()


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What the streams of one draw saw: tokens per second from the first request to the last token; the median and the
    longest time to a first token; the median, the 99th percentile and the longest of all gaps.
    """

    tokens_per_s: float
    ttft_s: float
    ttft_longest_s: float
    gap_s: float
    gap_p99_s: float
    gap_longest_s: float


def draw_of(streams: Sequence[Stream]) -> Draw:
    """The figures of one draw, whose streams have at least two pieces."""
    ttfts = [stream.ttft_s for stream in streams]
    gaps = sorted(gap for stream in streams for gap in stream.gaps_s)
    lasted_s = max(stream.pieces_s[-1] for stream in streams) - min(stream.sent_s for stream in streams)
    return Draw(
        tokens_per_s=sum(len(stream.tokens) for stream in streams) / lasted_s,
        ttft_s=statistics.median(ttfts),
        ttft_longest_s=max(ttfts),
        gap_s=statistics.median(gaps),
        gap_p99_s=gaps[int(0.99 * (len(gaps) - 1))],
        gap_longest_s=gaps[-1],
    )


def middle(draws: Sequence[Draw]) -> dict[str, float]:
    """The median of each figure."""
    return {name.name: statistics.median(getattr(draw, name.name) for draw in draws) for name in fields(Draw)}


def prompts_of(seed: int, *, count: int, tokens: int) -> list[Prompt]:
    """Prompts of random tokens, so that no cache has any of them."""
    chance = random.Random(seed)
    return [tuple(chance.choices(range(VOCABULARY), k=tokens)) for _ in range(count)]


async def run_streams(
    asked: Sequence[tuple[Server, Prompt]], *, name: str, max_tokens: int, temperature: float
) -> list[Stream]:
    """Send all requests at once and read their answers to the end. `name` makes their ids unique.

    Raises:
        StreamError: one was refused, or got fewer or more tokens than it asked for.
    """
    loop = asyncio.get_running_loop()
    connections = []
    for number, (server, prompt) in enumerate(asked):
        request = server.request(f"{name}-{number}", prompt, max_tokens=max_tokens, temperature=temperature)
        made = await loop.create_connection(_maker(request, server.tokens_of), "127.0.0.1", server.port)
        connections.append(made[1])
    streams = await asyncio.gather(*(connection.ended for connection in connections))
    if wrong := sorted({len(stream.tokens) for stream in streams} - {max_tokens}):
        raise StreamError(f"asked for {max_tokens} tokens, got {', '.join(map(str, wrong))}")
    return streams


def _maker(request: bytes, tokens_of: TokensOf) -> Callable[[], _Connection]:
    return lambda: _Connection(request, tokens_of)


def compare(
    arms: Mapping[str, Sequence[Server]],
    *,
    loads: Sequence[int],
    draws: int,
    prompt_tokens: int,
    max_tokens: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """The medians of `draws` draws of each load by arm. Arms take turns in alternating order, and get the same prompts;
    an arm deals them among its servers. A draw before these does not count.

    Raises:
        StreamError: a request failed.
    """
    found: dict[tuple[int, str], list[Draw]] = {(load, name): [] for load in loads for name in arms}
    for load in loads:
        for number in range(draws + 1):
            prompts = prompts_of(1000 * load + number, count=load, tokens=prompt_tokens)
            for arm in list(arms) if number % 2 else list(arms)[::-1]:
                asked = list(zip(cycle(arms[arm]), prompts, strict=False))
                name = f"{arm}-{load}-{number}"
                sent = run_streams(asked, name=name, max_tokens=max_tokens, temperature=temperature)
                draw = draw_of(asyncio.run(sent))
                if number:
                    found[load, arm].append(draw)
    return [{"arm": arm, "streams": load, "draws": draws, **middle(each)} for (load, arm), each in found.items()]
