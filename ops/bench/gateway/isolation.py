"""Isolation of interactive requests from batches: TTFT without a batch, with one released by measured capacity (gated),
and with one released at once (ungated).

A real stack (gateway, dispatcher, Postgres, Valkey, one node on the replay engine) gets the same interactive requests
at the same times in each arm; rounds alternate between the arms, in another order each. A batch is submitted when an
arm begins, and meets its window if all its lines have ended when the arm does. Replayed GPUs are slowed down
(`--replay-speed`), so that their times, and not this machine's, make up most of a TTFT.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import httpx2 as httpx
import typer

from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.faults.load import Reading
from ops.faults.percentiles import percentile
from ops.local.replay_stack import Fleet, ReplayStack
from ops.local.stack import Wiring

TIERS = ("priority", "default")
PROMPT_WORDS_MIN, PROMPT_WORDS_MAX = 60, 500
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request `at_s` after the start, with a prompt of `words` words, unique by its `number`. `tokens`: of its
    answer; None: as many as the load's answers have.
    """

    at_s: float
    number: int
    words: int
    tier: str
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`ttft_s`: from sending to the first token; None without one, for the `reason`."""

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
    """A chat request with a prompt of so many words and an answer of so many tokens. Replayed words are few, so that
    only several tell prompts apart.
    """
    name = [f"{number}{letter}" for letter in "abcd"]
    prompt = " ".join([*name, *["wave"] * (words - len(name))])
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


class IsolationLoad:
    """A client of one gateway. It retries nothing; refusals are counted."""

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
        asked = body(self._model, arrival.number, arrival.words, arrival.tokens or self._tokens)
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

    async def submit_batch(self, lines: int, seed: int) -> str:
        """Submit a batch of requests like the interactive ones; its id."""
        source = random.Random(seed)
        return await self.submit([body(self._model, n, _words(source), self._tokens) for n in range(lines)], "24h")

    async def submit(self, bodies: Sequence[dict[str, Any]], window: str) -> str:
        """Submit a batch of these requests; its id."""
        content = "\n".join(
            json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": asked})
            for n, asked in enumerate(bodies)
        )
        file = {"file": ("in.jsonl", content.encode(), "application/jsonl")}
        file_id = (await self._call("POST", "/v1/files", files=file, data={"purpose": "batch"}))["id"]
        about = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": window}
        return str((await self._call("POST", "/v1/batches", json=about))["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return await self._call("GET", f"/v1/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> None:
        """Cancel a batch, unless it has just ended."""
        with suppress(httpx.HTTPStatusError):
            await self._call("POST", f"/v1/batches/{batch_id}/cancel")

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = await self._http.request(method, path, **request)
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
        return content


Arm = Literal["no batch", "gated", "ungated"]
ARMS: tuple[Arm, ...] = ("no batch", "gated", "ungated")
MOVES_MAX = 0.10
IDLE_TIMEOUT_S = 120.0
WARM_UP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What each arm gets: `per_s` interactive requests for `seconds`, and a batch of `lines`; answers of `tokens`."""

    per_s: float
    seconds: float
    lines: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """One arm of one round. `batch_done`: the share of the batch's lines that had ended as the arm did."""

    arm: Arm
    number: int
    requests: int
    unanswered: dict[str, int]
    ttft_p50_s: float
    ttft_p95_s: float
    batch_done: float | None
    batch_s: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over an arm's rounds. `moves`: of p95 against the same round without a batch."""

    arm: Arm
    ttft_p50_s: float
    ttft_p95_s: float
    moves: float
    unanswered: int
    batch_done: float | None
    batch_s: float | None


def rows(rounds: Sequence[Round]) -> list[Row]:
    """One row for each arm."""
    bare_s = {each.number: each.ttft_p95_s for each in rounds if each.arm == "no batch"}
    found = []
    for arm in ARMS:
        mine = [each for each in rounds if each.arm == arm]
        done = [each.batch_done for each in mine if each.batch_done is not None]
        took_s = [each.batch_s for each in mine if each.batch_s is not None]
        found.append(
            Row(
                arm=arm,
                ttft_p50_s=median(each.ttft_p50_s for each in mine),
                ttft_p95_s=median(each.ttft_p95_s for each in mine),
                moves=median(each.ttft_p95_s / bare_s[each.number] - 1 for each in mine),
                unanswered=sum(sum(each.unanswered.values()) for each in mine),
                batch_done=min(done) if done else None,
                batch_s=median(took_s) if took_s else None,
            )
        )
    return found


class _Bench:
    def __init__(self, stack: ReplayStack, flag: Path, load: Load) -> None:
        self._stack = stack
        self._flag = flag
        self._load = load
        local = stack.local
        [model] = stack.fleet.model_names()
        self._client = IsolationLoad(local.url, local.keys["client"], model, load.tokens)

    async def run(self, rounds: int, seed: int) -> list[Round]:
        """All rounds, after a short load that warms up and is not counted."""
        await self._stack.register()
        await self._stack.wait_ready()
        await self._client.interactive(drawn(seed - 1, per_s=self._load.per_s, seconds=WARM_UP_S))
        found = []
        for number in range(rounds):
            arrivals = drawn(seed + number, per_s=self._load.per_s, seconds=self._load.seconds)
            first = number % len(ARMS)
            for arm in (*ARMS[first:], *ARMS[:first]):
                found.append(await self._arm(arm, number, arrivals))
                notes().print(_line(found[-1]), soft_wrap=True)
        await self._client.close()
        return found

    async def _arm(self, arm: Arm, number: int, arrivals: Sequence[Arrival]) -> Round:
        if arm == "ungated":
            self._flag.touch()
        batch_id = None if arm == "no batch" else await self._client.submit_batch(self._load.lines, number)
        sending = asyncio.create_task(self._client.interactive(arrivals))
        done, took_s = await self._watch(batch_id, self._load.seconds)
        answers = await sending
        if batch_id is not None and took_s is None:
            await self._client.cancel(batch_id)
        await self._stack.wait_idle(IDLE_TIMEOUT_S)
        self._flag.unlink(missing_ok=True)
        return _round(arm, number, answers, done, took_s)

    async def _watch(self, batch_id: str | None, seconds: float) -> tuple[float | None, float | None]:
        """The share of a batch's lines that ended within `seconds`, and after how long all had ended; None: not all."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        done = took_s = None
        while (now_s := loop.time()) < started_s + seconds:
            if batch_id is not None and took_s is None:
                counts = (await self._client.batch(batch_id))["request_counts"]
                done = (counts["completed"] + counts["failed"]) / self._load.lines
                took_s = now_s - started_s if done == 1 else None
            await asyncio.sleep(min(1.0, started_s + seconds - now_s))
        return done, took_s


def _round(arm: Arm, number: int, answers: Sequence[Answer], done: float | None, took_s: float | None) -> Round:
    ttft_s = [float("inf") if answer.ttft_s is None else answer.ttft_s for answer in answers]
    return Round(
        arm=arm,
        number=number,
        requests=len(answers),
        unanswered=dict(Counter(answer.reason for answer in answers if answer.ttft_s is None)),
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p95_s=percentile(ttft_s, 0.95),
        batch_done=done,
        batch_s=took_s,
    )


def _line(found: Round) -> str:
    batch = "" if found.batch_done is None else f", batch {found.batch_done:.0%}"
    took = "" if found.batch_s is None else f" after {found.batch_s:.0f} s"
    return (
        f"round {found.number + 1}, {found.arm}: {found.requests} requests, unanswered {found.unanswered or 0}, "
        f"first token p50 {found.ttft_p50_s:.3f} s, p95 {found.ttft_p95_s:.3f} s{batch}{took}"
    )


async def _measure(home: Path, fleet: Fleet, load: Load, rounds: int, seed: int) -> list[Round]:
    flag = home / "ungated"
    wiring = Wiring(
        replicas={"forecaster": 0},
        programs={"dispatcher": ("-m", "ops.bench.gateway.isolation_ungated", str(flag))},
    )
    environment = {
        "TIDEPOOL_DATABASE_URL": "",
        "TIDEPOOL_REDIS_URL": "",
        "TIDEPOOL_SCALE_EVERY_S": "2",
        "TIDEPOOL_DISPATCHER_CONCURRENCY_MAX": "200",
    }
    stack = ReplayStack(home, fleet, environment=environment, wiring=wiring)
    await asyncio.to_thread(stack.local.supervisor.start)
    try:
        return await _Bench(stack, flag, load).run(rounds, seed)
    finally:
        await asyncio.to_thread(stack.local.stop)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Length of an arm, and the batch's window.")] = 25.0,
    per_s: Annotated[float, typer.Option(min=0.1, help="Interactive requests a second.")] = 4.0,
    lines: Annotated[int, typer.Option(min=1, help="Lines of the batch.")] = 25,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 20,
    kv_tokens: Annotated[int, typer.Option(min=1000, help="What the node's KV cache holds.")] = 12_000,
    replay_speed: Annotated[float, typer.Option(min=0.01, help="1: as fast as an H800.")] = 0.2,
    seed: Annotated[int, typer.Option()] = 1,
    home: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to run in and to keep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far a batch moves interactive first tokens. Exit status 1 if the gated one moves p95 by over 10 %, or
    did not meet its window.

    \b
    Examples:
      python -m ops.bench.gateway.isolation
      python -m ops.bench.gateway.isolation --rounds 5 --seconds 60 --lines 60 --json
    """
    fleet = Fleet(regions=1, nodes=1, models=1, instances_max=1, kv_tokens=kv_tokens, replay_speed=replay_speed)
    load = Load(per_s=per_s, seconds=seconds, lines=lines, tokens=tokens)
    with work_folder(home) as folder:
        rounds_found = asyncio.run(_measure(folder, fleet, load, rounds, seed))
    found = rows(rounds_found)
    if as_json:
        print_json({"load": asdict(load), "rows": list(map(asdict, found)), "rounds": list(map(asdict, rounds_found))})
    else:
        columns: Columns = {
            "arm": "arm",
            "first token p50": lambda row: f"{row['ttft_p50_s']:.3f} s",
            "p95": lambda row: f"{row['ttft_p95_s']:.3f} s",
            "moves": lambda row: f"{row['moves']:+.1%}",
            "unanswered": "unanswered",
            "of the batch": lambda row: "" if row["batch_done"] is None else f"{row['batch_done']:.0%}",
            "after": lambda row: "" if row["batch_s"] is None else f"{row['batch_s']:.0f} s",
        }
        print_table(f"Interactive requests, medians of {rounds} rounds", columns, map(asdict, found))
    gated = next(row for row in found if row.arm == "gated")
    if gated.moves > MOVES_MAX or gated.batch_done != 1:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
