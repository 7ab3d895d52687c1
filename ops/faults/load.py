"""The load of a fault run: interactive streams with known tokens, and batches, one after the other.

The client retries as OpenAI's does: a request that failed before the first byte of its answer goes to the next gateway,
as behind a load balancer; a stream that breaks later is not retried.
"""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2 as httpx

RETRIES_MAX = 2
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 8.0
RETRIED_STATUSES = frozenset({408, 409, 429})
PROMPTS = 4
STREAM_TOKENS = 60
LINE_TOKENS = 20
SLO_FIRST_TOKEN_S = {"priority": 1.0, "default": 60.0}
TIMEOUT_S = 90.0

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"n": 3, "temperature": 1, "seed": 7, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 11, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logprobs": True},
    {"temperature": 0, "tools": _TOOLS, "logit_bias": {"5": -3}},
)
"""What the requests of each prompt ask for in addition; the answers are deterministic."""

Outcome = Literal["whole", "error", "broken", "refused", "unreachable"]
"""`error`: the stream ended by an error event; `broken`: its connection broke; `refused`: no retry helped."""


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """One interactive request. `started_s` and `ended_s` are on `time.monotonic`; `parts` is the received part of the
    answer: the text of each channel of each choice, such as `0 content`.
    """

    model: str
    prompt: int
    tier: str
    started_s: float
    ended_s: float
    first_token_s: float | None
    attempts: int
    outcome: Outcome
    reason: str
    parts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """An uploaded batch."""

    batch_id: str
    file_id: str
    lines: Mapping[str, tuple[str, int]]
    """custom_id -> model and prompt."""


@dataclass(kw_only=True)
class Sent:
    """Requests of a load and their outcomes so far."""

    streams: list[Streamed] = field(default_factory=list)
    batches: list[Uploaded] = field(default_factory=list)
    uploads_failed: list[str] = field(default_factory=list)


def prompt_text(number: int) -> str:
    """The text of a prompt."""
    return f"tell me about wave number {number}"


def body_of(model: str, prompt: int, tokens: int) -> dict[str, Any]:
    """The body of a request whose answer is deterministic."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt_text(prompt)}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **VARIANTS[prompt],
    }


class Load:
    """Clients of some gateways, with one key."""

    def __init__(self, urls: Sequence[str], key: str, models: Sequence[str], seed: int) -> None:
        self._urls = urls
        self._models = models
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(TIMEOUT_S, connect=5.0),
            limits=httpx.Limits(max_connections=500, max_keepalive_connections=0),
            trust_env=False,
        )
        self.sent = Sent()

    async def close(self) -> None:
        await self._http.aclose()

    async def undisturbed(self) -> dict[tuple[str, int], Mapping[str, str]]:
        """The answer to every prompt by every model, read before any fault is injected.

        Raises:
            RuntimeError: a stream fails.
        """
        answers = {}
        for prompt in range(PROMPTS):
            streams = await asyncio.gather(*(self._stream(model, prompt, "default") for model in self._models))
            for streamed in streams:
                if streamed.outcome != "whole":
                    raise RuntimeError(f"no answer without any fault: {streamed.outcome} {streamed.reason}")
                answers[streamed.model, prompt] = streamed.parts
        return answers

    async def interactive(self, streams: int, until: asyncio.Event) -> None:
        """Keep `streams` running; each that ends is followed by another."""
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._streams(until))

    async def _streams(self, until: asyncio.Event) -> None:
        while not until.is_set():
            model, prompt = self._random.choice(self._models), self._random.randrange(PROMPTS)
            tier = self._random.choice(tuple(SLO_FIRST_TOKEN_S))
            self.sent.streams.append(await self._stream(model, prompt, tier))
            await asyncio.sleep(self._random.uniform(0.0, 0.5))

    async def batches(self, lines: int, every_s: float, until: asyncio.Event) -> None:
        """Upload a batch of `lines` every `every_s`."""
        while not until.is_set():
            await self._upload(lines)
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), every_s)

    async def _upload(self, count: int) -> None:
        lines = {f"r{n}": (self._random.choice(self._models), self._random.randrange(PROMPTS)) for n in range(count)}
        content = "\n".join(
            json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
            for name, (model, prompt) in lines.items()
            for body in [body_of(model, prompt, LINE_TOKENS)]
        )
        try:
            files = {"file": ("in.jsonl", content.encode(), "application/jsonl")}
            file_id = (await self._post("/v1/files", files=files, data={"purpose": "batch"}))["id"]
            about = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch_id = (await self._post("/v1/batches", json=about))["id"]
        except httpx.HTTPError as error:
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else ""
            self.sent.uploads_failed.append(f"{type(error).__name__} {status}".strip())
            return
        self.sent.batches.append(Uploaded(batch_id=batch_id, file_id=file_id, lines=lines))

    async def _post(self, path: str, **request: Any) -> Any:
        """A call without streaming, with retries as OpenAI's client does."""
        failure: httpx.HTTPError | None = None
        async for url in self._tries():
            try:
                answer = await self._http.post(f"{url}{path}", **request)
                answer.raise_for_status()
            except httpx.HTTPStatusError as error:
                if not _is_retried(error.response.status_code):
                    raise
                failure = error
            except httpx.HTTPError as error:
                failure = error
            else:
                return answer.json()
        assert failure is not None
        raise failure

    async def _stream(self, model: str, prompt: int, tier: str) -> Streamed:
        reading = Reading()
        started_s, attempts = time.monotonic(), 0
        outcome: Outcome = "unreachable"
        body = {**body_of(model, prompt, STREAM_TOKENS), "stream": True, "service_tier": tier}
        async for url in self._tries():
            attempts += 1
            outcome = await self._attempt(url, body, reading)
            if outcome not in {"refused", "unreachable"} or reading.final:
                break
        return Streamed(
            model=model,
            prompt=prompt,
            tier=tier,
            started_s=started_s,
            ended_s=time.monotonic(),
            first_token_s=None if reading.first_s is None else reading.first_s - started_s,
            attempts=attempts,
            outcome=outcome,
            reason=reading.reason,
            parts={name: "".join(texts) for name, texts in reading.parts.items()},
        )

    async def _attempt(self, url: str, body: dict[str, Any], reading: "Reading") -> Outcome:
        try:
            async with self._http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    reading.refused(answer.status_code, await answer.aread())
                    return "refused"
                reading.begun = True
                async for line in answer.aiter_lines():
                    reading.take(line)
        except httpx.HTTPError as error:
            reading.reason = type(error).__name__
            return "broken" if reading.begun else "unreachable"
        if reading.failed:
            return "error"
        return "whole" if reading.done else "broken"

    async def _tries(self) -> AsyncIterator[str]:
        """The gateways to try, one after the other, with exponential backoff."""
        first = self._random.randrange(len(self._urls))
        for attempt in range(RETRIES_MAX + 1):
            if attempt:
                await asyncio.sleep(min(RETRY_FIRST_S * 2 ** (attempt - 1), RETRY_MAX_S))
            yield self._urls[(first + attempt) % len(self._urls)]


@dataclass(kw_only=True)
class Reading:
    """The state of a stream. `final`: it was refused, and a retry does not help."""

    parts: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    first_s: float | None = None
    begun: bool = False
    done: bool = False
    failed: bool = False
    final: bool = False
    reason: str = ""

    def refused(self, status: int, body: bytes) -> None:
        """Record an answer that is no stream."""
        self.final = not _is_retried(status)
        try:
            self.reason = f"{status} {json.loads(body)['error']['code']}"
        except (ValueError, KeyError, TypeError):
            self.reason = f"{status}"

    def take(self, line: str) -> None:
        """Read one line of server-sent events."""
        if not line.startswith("data: "):
            return
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.failed, self.reason = True, f"{event['error']['code']}: {event['error']['message'][:80]}"
            return
        for choice in event["choices"]:
            for channel, text in _texts_of(choice):
                self.parts[f"{choice['index']} {channel}"].append(text)
        if self.parts and self.first_s is None:
            self.first_s = time.monotonic()


def _texts_of(choice: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a chunk adds to each channel of its choice."""
    delta = choice["delta"]
    for channel in ("content", "reasoning_content"):
        if delta.get(channel):
            yield channel, delta[channel]
    for call in delta.get("tool_calls") or ():
        yield f"call {call['index']}", (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
    for token in (choice.get("logprobs") or {}).get("content") or ():
        yield "logprobs", f"{token['token']} {len(token['top_logprobs'])}, "


def _is_retried(status: int) -> bool:
    return status in RETRIED_STATUSES or status >= 500
