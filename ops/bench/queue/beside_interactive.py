"""The benchmark of llm-d's batch gateway (llm-d-batch-gateway, issue 491), run on this system: three batch jobs beside
interactive requests that come in bursts, on two replicas.

Three arms get the same interactive requests at the same times, first 1 a second, then 15 a second, in cycles: alone;
with lines of the jobs sent as interactive requests too, 4 a second (unprotected); and with the jobs
submitted to the Batch API before the first request (gated). A line asks for about 500 tokens (log-normal, deviation
400, at most 2,048), an interactive request for 128, and every prompt has 512. The replicas are replayed with step times
that follow from the latencies published there.

`--speed` below 1 slows the replayed GPUs, the arrivals and the windows down alike, so that the times of the replicas
and not of this machine make up the result. Every figure that is printed is in the replicas' time. The times of the
control plane are slowed down with them, apart from how often a dispatcher looks for what waits. `--simulated` runs the
load in the simulator instead, on the same policies, in seconds, without the unprotected arm.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.settings import Settings
from ops.bench.gateway.isolation import Answer, IsolationLoad, body
from ops.bench.queue.beside_interactive_load import (
    ANSWER_TOKENS,
    ARMS,
    BATCH_MAX,
    KV_TOKENS,
    PROMPT_WORDS,
    REPLICAS,
    THEIRS,
    WINDOWS_MIN,
    Arm,
    Load,
    Round,
    interactive,
    is_burst,
    line_tokens,
    rows,
    unprotected,
)
from ops.bench.queue.beside_interactive_simulated import simulated
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.faults.percentiles import percentile
from ops.local.replay_stack import Fleet, ReplayStack
from ops.local.sample_fleet import PROFILES
from ops.local.stack import Wiring
from ops.local.waiting import wait_until

WINDOW_MAX_MIN = 168 * 60
DONE_TIMEOUT_S, IDLE_TIMEOUT_S, WARM_UP_S = 3600.0, 300.0, 5.0
MOVES_MAX = 0.10
HEARTBEAT_S = 1.0
SLOWED_S = {
    "heartbeat_stale_s": math.inf,
    "view_refresh_s": 1.0,
    "slo_iw_f_ttft_s": math.inf,
    "release_signal_s": math.inf,
    "release_hold_s": math.inf,
    "release_calm_s": math.inf,
}
"""Times of the control plane, and the most that each may be."""
SLOWED_PER_S = ("release_growth", "release_growth_after_cut")
"""Its rates."""
PROMPTS_MAX = 10_000_000


class Bench:
    """The arms, one after the other, on one stack."""

    def __init__(self, stack: ReplayStack, load: Load) -> None:
        self._stack = stack
        self._load = load
        [self._model] = stack.fleet.model_names()
        self._arms = 0
        self._client = IsolationLoad(stack.local.url, stack.local.keys["client"], self._model, ANSWER_TOKENS)

    async def run(self, arms: Sequence[Arm], rounds: int) -> list[Round]:
        """All rounds, each of all arms in an order that rotates, after a short load that is not counted."""
        await self._stack.register()
        await self._stack.wait_ready()
        warm_up = Load(phase_s=WARM_UP_S, cycles=1, lines=0, speed=1.0)
        await self._client.interactive([each for each in interactive(warm_up) if is_burst(each, warm_up)])
        found = []
        for number in range(rounds):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                found.append(await self._arm(arm, number))
                notes().print(_line(found[-1]), soft_wrap=True)
        await self._client.close()
        return found

    async def _arm(self, arm: Arm, number: int) -> Round:
        load, jobs, lines = self._load, [], []
        self._arms += 1
        first = self._arms * PROMPTS_MAX  # no prompt is in a prefix cache
        if arm == "gated":
            jobs = await self._submit(number, first)
        elif arm == "unprotected":
            lines = unprotected(load, number, first)
        started_s = time.monotonic()
        watching = asyncio.create_task(self._watch(jobs, started_s))
        straight = asyncio.create_task(self._client.interactive(lines))
        answers = await self._client.interactive(interactive(load, first + PROMPTS_MAX // 2))
        await asyncio.sleep(started_s + load.seconds / load.speed - time.monotonic())
        done = await self._done(jobs) if jobs else None
        for batch_id, shown in [(job, await self._client.batch(job)) for job in jobs]:
            if shown["tidepool"]:
                notes().print(f"{batch_id}: {shown['tidepool']['reason']}", soft_wrap=True)
        took_s, failed = await watching
        refused = [each for each in await straight if each.ttft_s is None]
        await self._stack.wait_idle(IDLE_TIMEOUT_S)
        return self._round(arm, number, answers, done=done, took_s=took_s, failed=failed + len(refused))

    async def _submit(self, number: int, first: int) -> list[str]:
        jobs = []
        for job, minutes in enumerate(WINDOWS_MIN):
            lengths = line_tokens(self._load.lines, number * len(WINDOWS_MIN) + job)
            numbers = range(first + job * self._load.lines, first + (job + 1) * self._load.lines)
            bodies = [body(self._model, n, PROMPT_WORDS, tokens) for n, tokens in zip(numbers, lengths, strict=True)]
            window_min = min(WINDOW_MAX_MIN, math.ceil(minutes / self._load.speed))
            jobs.append(await self._client.submit(bodies, f"{window_min}m"))
        return jobs

    async def _watch(self, jobs: Sequence[str], started_s: float) -> tuple[float | None, int]:
        """After how many of the replicas' seconds all lines were done, and how many of them failed."""

        async def are_done() -> bool:
            return await self._done(jobs) == 1.0

        if not jobs:
            return None, 0
        took = await wait_until(are_done, DONE_TIMEOUT_S)
        took_s = (time.monotonic() - started_s) * self._load.speed if took else None
        failed = [(await self._client.batch(job))["request_counts"]["failed"] for job in jobs]
        for job in jobs:
            await self._client.cancel(job)
        return took_s, sum(failed)

    async def _done(self, jobs: Sequence[str]) -> float:
        counts = [(await self._client.batch(job))["request_counts"] for job in jobs]
        return float(sum(each["completed"] + each["failed"] for each in counts) / (self._load.lines * len(jobs)))

    def _round(self, arm: Arm, number: int, answers: Sequence[Answer], **batch: Any) -> Round:
        speed = self._load.speed
        times_s: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for each in answers:
            ttft_s = math.inf if each.ttft_s is None else each.ttft_s * speed
            times_s[is_burst(each.arrival, self._load)].append((each.arrival.at_s * speed, ttft_s))
        bursts, idle = ([ttft_s for _, ttft_s in times_s[busy]] for busy in (True, False))
        return Round(
            arm=arm,
            number=number,
            requests=len(answers),
            unanswered=sum(each.ttft_s is None for each in answers),
            burst_p50_s=percentile(bursts, 0.5),
            burst_p95_s=percentile(bursts, 0.95),
            idle_p95_s=percentile(idle, 0.95),
            bursts=tuple(times_s[True]),
            **batch,
        )


def _line(found: Round) -> str:
    done = "" if found.done is None else f", {found.done:.0%} of the lines"
    took = "" if found.took_s is None else f", all after {found.took_s:.0f} s"
    return (
        f"round {found.number + 1}, {found.arm}: {found.requests} requests, unanswered {found.unanswered}, first token"
        f" in bursts p50 {found.burst_p50_s * 1000:.0f} ms, p95 {found.burst_p95_s * 1000:.0f} ms, between them p95"
        f" {found.idle_p95_s * 1000:.0f} ms{done}{took}, failed lines {found.failed}"
    )


def slowed(speed: float) -> dict[str, str]:
    """The control plane's times and rates as they are for replicas that run at this speed."""
    defaults = Settings().model_dump()
    times = {name: min(defaults[name] / speed, most) for name, most in SLOWED_S.items()}
    rates = {name: defaults[name] * speed for name in SLOWED_PER_S}
    return {f"TIDEPOOL_{name.upper()}": f"{value:g}" for name, value in (times | rates).items()}


async def measure(home: Path, load: Load, arms: Sequence[Arm], rounds: int) -> list[Round]:
    """Start a stack, run the arms on it, and stop it."""
    fleet = Fleet(
        regions=1,
        nodes=REPLICAS,
        models=1,
        instances_min=REPLICAS,
        instances_max=REPLICAS,
        kv_tokens=KV_TOKENS,
        batch_max=BATCH_MAX,
        replay_speed=load.speed,
        heartbeat_s=HEARTBEAT_S / load.speed,
        profile=PROFILES / "a100-gpt-oss.toml",
    )
    environment = {
        "TIDEPOOL_DATABASE_URL": "",
        "TIDEPOOL_REDIS_URL": "",
        "TIDEPOOL_SCALE_EVERY_S": "2",
        "TIDEPOOL_DISPATCHER_CONCURRENCY_MAX": "1000",
        **slowed(load.speed),
    }
    stack = ReplayStack(home, fleet, environment=environment, wiring=Wiring(replicas={"forecaster": 0}))
    await asyncio.to_thread(stack.local.supervisor.start)
    try:
        return await Bench(stack, load).run(arms, rounds)
    finally:
        await asyncio.to_thread(stack.local.stop)


def _ms(field: str) -> Any:
    return lambda row: "" if row[field] is None else f"{row[field] * 1000:,.0f} ms"


def _share(field: str, pattern: str) -> Any:
    return lambda row: "" if row[field] is None else pattern.format(row[field])


COLUMNS: Columns = {
    "arm": "arm",
    "theirs: p95": _ms("theirs_p95_s"),
    "x alone": _share("theirs_moves", "{:.2f}"),
    "done": _share("theirs_done", "{:.0%}"),
    "all after": _share("theirs_took_min", "{:.0f} min"),
    "ours: p95": _ms("ours_p95_s"),
    "x alone ": _share("ours_moves", "{:.2f}"),
    "while lines ran": _share("ours_beside", "{:.2f}"),
    "done ": _share("ours_done", "{:.0%}"),
    "all after ": _share("ours_took_min", "{:.1f} min"),
    "failed": lambda row: "" if row["ours_failed"] is None else row["ours_failed"],
}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    phase_s: Annotated[float, typer.Option(min=1, help="Length of a phase, in the replicas' time.")] = 90.0,
    cycles: Annotated[int, typer.Option(min=1, help="Cycles of two phases; theirs were ten.")] = 2,
    lines: Annotated[int, typer.Option(min=1, help="Lines of each of the three jobs.")] = 1000,
    speed: Annotated[float, typer.Option(min=0.01, help="1: replicas as fast as theirs.")] = 0.25,
    home: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to run in and to keep.")] = None,
    in_simulator: Annotated[bool, typer.Option("--simulated", help="Run the load in the simulator.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run llm-d-batch-gateway's benchmark and print its results beside ours. Exit status 1 if batches move interactive
    first tokens by over 10 % (in all bursts, or while lines ran), a line is not done, or all take longer than theirs
    with AIMD (by so many lines).

    \b
    Examples:
      python -m ops.bench.queue.beside_interactive
      python -m ops.bench.queue.beside_interactive --phase-s 20 --cycles 1 --lines 200
      python -m ops.bench.queue.beside_interactive --simulated --cycles 10
    """
    load = Load(phase_s=phase_s, cycles=cycles, lines=lines, speed=speed)
    if in_simulator:
        rounds_found = [found for number in range(rounds) for found in simulated(load, number)]
    else:
        with work_folder(home) as folder:
            rounds_found = asyncio.run(measure(folder, load, ARMS, rounds))
    found = rows(rounds_found)
    if as_json:
        print_json(
            {
                "load": asdict(load),
                "rows": list(map(asdict, found)),
                "rounds": [asdict(replace(each, bursts=())) for each in rounds_found],
            }
        )
    else:
        print_table(f"First tokens in bursts, and three jobs of {lines} lines", COLUMNS, map(asdict, found))
    gated = found[-1]
    took_max_min = (THEIRS[-1].took_min or math.inf) * lines / 1000
    slow = gated.ours_took_min is None or gated.ours_took_min > took_max_min
    moves = max(gated.ours_moves or math.inf, gated.ours_beside or 0.0)
    if moves > 1 + MOVES_MAX or slow or gated.ours_failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
