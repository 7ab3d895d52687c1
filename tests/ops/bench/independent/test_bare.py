"""The server that does nothing but stream, and how its metrics are watched."""

import asyncio
import json
import time
from contextlib import suppress

import httpx2 as httpx

from dataplane.protocol.tiers import Tier
from ops.bench.independent.bare import FIRST_TOKEN_S, bare_server
from ops.bench.independent.counts import Counts
from ops.bench.independent.watch import watching

CHAT = {"messages": [{"role": "user", "content": "the tide turns"}], "max_completion_tokens": 5, "stream": True}


async def _ask(url: str) -> tuple[list[str], dict[str, int]]:
    """The texts of an answer's chunks, and its usage."""
    texts, usage = [], {}
    async with httpx.AsyncClient(trust_env=False) as http, http.stream("POST", f"{url}/v1/c", json=CHAT) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage", usage)
                texts += [choice["delta"].get("content", "") for choice in chunk["choices"]]
    return texts, usage


def test_it_streams_what_was_asked_for_and_counts_it() -> None:
    async def run() -> tuple[list[str], dict[str, int], Counts]:
        async with bare_server() as url:
            await _ask(url)
            began_s = time.time()
            async with watching(url, Tier.IW_N) as watch:
                texts, usage = await _ask(url)
            return texts, usage, watch.between(began_s, None)

    texts, usage, counts = asyncio.run(run())
    assert len("".join(texts).split()) == 5
    assert usage == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert (counts.answered, counts.errors, counts.input_tokens, counts.output_tokens) == (1, 0, 3, 5)
    assert counts.first_tokens == counts.paced == 1
    assert counts.ttft_sum_s >= FIRST_TOKEN_S


def test_a_client_that_leaves_is_an_error_and_is_waited_for() -> None:
    async def run() -> Counts:
        async with bare_server() as url:
            async with watching(url, Tier.IW_N) as watch, httpx.AsyncClient(trust_env=False) as http:
                asked = CHAT | {"max_completion_tokens": 100_000}
                with suppress(httpx.ReadError):
                    async with http.stream("POST", f"{url}/v1/c", json=asked) as answer:
                        await anext(answer.aiter_lines())
            return watch.between(0.0, None)

    counts = asyncio.run(run())
    assert (counts.answered, counts.errors, counts.output_tokens) == (0, 1, 0)
