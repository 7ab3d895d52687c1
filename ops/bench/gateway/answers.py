"""CPU seconds of the gateway for a streamed token, by what the answer holds: text alone, log probabilities of the five
likeliest tokens, arguments of a tool call, or both. One gateway before one upstream; paced streams, so that no kind
gains by reading several tokens at once. The kinds alternate in every round, and a ratio is of two figures of one round.
"""

import asyncio
import os
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from ops.bench.gateway.run import PEERS, load, request_bytes
from ops.bench.gateway.stack import fill_one_node, gateway_process, served_by
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, print_json, print_table
from ops.local.ports import free_port

RATIO_MAX = 1.3
_CHAT = "/v1/chat/completions"
_TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}
_LOGPROBS = {"logprobs": True, "top_logprobs": 5}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain again": {},
    "logprobs": _LOGPROBS,
    "tools": _TOOLS,
    "tools and logprobs": _TOOLS | _LOGPROBS,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the rounds. `ratio`: to plain text of the same round."""

    answer: str
    token_cpu_us: float
    ratio: float


async def measure(port: int, pid: int, key: str, *, rounds: int, streams: int, tokens: int) -> list[Row]:
    """CPU seconds of the whole process, requests included, over the tokens.

    Raises:
        RuntimeError: a stream broke, or tokens are missing.
    """
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):  # the first warms up
        for kind, fields in KINDS.items():
            request = request_bytes(_CHAT, key, stream=True, **fields)
            seen = await load(port, request, streams=streams, each=1, pid=pid)
            if seen.failures or seen.tokens != streams * tokens:
                raise RuntimeError(f"{kind}: {seen.failures} streams broke, {seen.tokens} tokens arrived")
            if number:
                found[kind].append(seen.cpu_s / seen.tokens)
    return [
        Row(
            answer=kind,
            token_cpu_us=1e6 * statistics.median(figures),
            ratio=statistics.median(one / plain for one, plain in zip(figures, found["plain"], strict=True)),
        )
        for kind, figures in found.items()
    ]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    streams: Annotated[int, typer.Option(min=1, help="Connections.")] = 48,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a stream.")] = 100,
    every_ms: Annotated[float, typer.Option(min=0.0, help="Between the tokens of a stream.")] = 100.0,
    as_json: AsJson = False,
) -> None:
    """Measure the gateway's CPU for a token of each kind of answer. Exit status 1 if tools and log probabilities cost
    over 1.3 times plain text.

    \b
    Examples:
      python -m ops.bench.gateway.answers
      python -m ops.bench.gateway.answers --rounds 9 --json
    """
    upstream = free_port()
    command = [*PEERS, "upstream", str(upstream), str(tokens), str(every_ms / 1e3)]
    with (
        work_folder() as home,
        served_by(command, upstream, core=1),
        gateway_process(home, partial(fill_one_node, upstream=f"http://127.0.0.1:{upstream}"), core=0) as ours,
    ):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        rows = asyncio.run(measure(ours.port, ours.pid, ours.filled, rounds=rounds, streams=streams, tokens=tokens))
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
    else:
        columns = {"answer": "answer", "CPU a token, us": "token_cpu_us", "to plain": "ratio"}
        print_table(f"Medians of {rounds} rounds (target: {RATIO_MAX})", columns, map(asdict, rows))
    if rows[-1].ratio > RATIO_MAX:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
