"""The load of `isolation`: interactive requests at times drawn beforehand, whatever becomes of those before
them, and one batch.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from ops.faults.load import Reading

TIERS = ("priority", "default")
PROMPT_WORDS_MIN, PROMPT_WORDS_MAX = 60, 500
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that comes `at_s` after the start. Its prompt is `words` words long; its `number` makes it its own."""

    at_s: float
    number: int
    words: int
    tier: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`ttft_s`: from sending to the first token; None if none came, for the `reason`."""

    arrival: Arrival
    ttft_s: float | None
    reason: str


def drawn(seed: int, *, per_s: float, seconds: float) -> tuple[Arrival, ...]:
    """Poisson arrivals, log-uniform prompts. The same seed draws the same."""
    source = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = source.expovariate(per_s)
    while at_s < seconds:
        words, tier = _words(source), source.choice(TIERS)
        arrivals.append(Arrival(at_s=at_s, number=len(arrivals), words=words, tier=tier))
        at_s += source.expovariate(per_s)
    return tuple(arrivals)


def _words(source: random.Random) -> int:
    return int(PROMPT_WORDS_MIN * (PROMPT_WORDS_MAX / PROMPT_WORDS_MIN) ** source.random())


def body(model: str, number: int, words: int, tokens: int) -> dict[str, Any]:
    """A chat request with a prompt of so many words and an answer of so many tokens."""
    prompt = " ".join(["tide", str(number), *["wave"] * (words - 2)])
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


class IsolationLoad:
    """A client of one gateway. Nothing is tried again: what is refused is counted."""

    def __init__(self, url: str, key: str, model: str, tokens: int) -> None:
        self._model = model
        self._tokens = tokens
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=1000, max_keepalive_connections=100),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def interactive(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Send each at its time; returns when all have ended."""
        started_s = time.monotonic()

        async def one(arrival: Arrival) -> Answer:
            await asyncio.sleep(started_s + arrival.at_s - time.monotonic())
            return await self._answer(arrival)

        return await asyncio.gather(*map(one, arrivals))

    async def _answer(self, arrival: Arrival) -> Answer:
        reading, sent_s = Reading(), time.monotonic()
        asked = body(self._model, arrival.number, arrival.words, self._tokens)
        asked |= {"stream": True, "service_tier": arrival.tier}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=asked) as answer:
                if answer.status_code != httpx.codes.OK:
                    reading.refused(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    reading.take(line)
        except httpx.HTTPError as error:
            reading.reason = type(error).__name__
        ttft_s = None if reading.first_s is None else reading.first_s - sent_s
        return Answer(arrival=arrival, ttft_s=ttft_s, reason=reading.reason)

    async def hand_in(self, lines: int, seed: int) -> str:
        """Hand in a batch of requests like the interactive ones; its id."""
        source = random.Random(seed)
        content = "\n".join(
            json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": asked})
            for n in range(lines)
            for asked in [body(self._model, n, _words(source), self._tokens)]
        )
        file = {"file": ("in.jsonl", content.encode(), "application/jsonl")}
        file_id = (await self._call("POST", "/v1/files", files=file, data={"purpose": "batch"}))["id"]
        about = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str((await self._call("POST", "/v1/batches", json=about))["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """What the API says of a batch."""
        return await self._call("GET", f"/v1/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> None:
        """Give up a batch, unless it ends just now."""
        with suppress(httpx.HTTPStatusError):
            await self._call("POST", f"/v1/batches/{batch_id}/cancel")

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = await self._http.request(method, path, **request)
        answer.raise_for_status()
        said: dict[str, Any] = answer.json()
        return said
