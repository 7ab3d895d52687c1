"""AIPerf and GuideLLM before a gateway with one replayed node, and what they saw beside what the gateway counted.

The node's model has a tokenizer whose tokens are words, and the load generators count with it too: tokens, errors and
answers must be equal. Mean first tokens may differ by the load generator's own time, which a server that does nothing
but stream shows first, and by 2 ms.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forecasts.importers.lines import DemandFileError
from ops.bench.independent.bare import bare_server
from ops.bench.independent.compare import APART_MAX_S, Row, faults
from ops.bench.independent.counts import Counts
from ops.bench.independent.scenarios import KINDS, Run, runs
from ops.bench.independent.schedule import HOUR_S, Schedule, write_schedule
from ops.bench.independent.tools import TOOLS, Load, Target, ToolError, emptied, executable, run_tool
from ops.bench.independent.watch import watching
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.local.replay_stack import Fleet, ReplayStack
from ops.local.stack import Wiring
from ops.local.word_tokenizer import write_word_tokenizer
from ops.simulator.traffic.traces import LISTINGS

CONTEXT_TOKENS = 16_384
KV_TOKENS = 200_000
LIMITED_PER_MINUTE = 12
"""Requests that the tenant of limited runs may send; it is refused all others."""
START_TIMEOUT_S = 600.0
"""A load generator that has not ended so long after its run should have is stopped."""


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """Where the programs are, where they write, and their targets; `limited` is the gateway with another key."""

    tools: Path
    out: Path
    gateway: Target
    limited: Target
    bare: Target

    async def rows(self, plan: Sequence[Run]) -> list[Row]:
        found: list[Row] = []
        overhead_s: dict[str, float | None] = {}
        for number, run in enumerate(plan, 1):
            notes().print(f"{number}/{len(plan)} {run.tool.name}, {run.name}: about {run.seconds:.0f} s and its start")
            rows = await self._run(run, overhead_s.get(run.baseline), emptied(self.out / f"{number:02}"))
            if run.bare:
                overhead_s[run.baseline] = rows[0].ttft_apart_s
            found += rows
        return found

    async def _run(self, run: Run, overhead_s: float | None, folder: Path) -> list[Row]:
        """One run, with a row for each of its phases; one that failed has a row that says so."""
        target = self.bare if run.bare else self.limited if run.limited else self.gateway
        program = executable(self.tools, run.tool.name)
        name = f"{run.tool.name} {run.name}"
        try:
            async with watching(target.url, run.tier) as watch:
                await run_tool(
                    program,
                    run.tool.arguments(target, run.load, run.options, folder),
                    folder,
                    timeout_s=run.seconds + START_TIMEOUT_S,
                    environment=run.tool.environment,
                )
            phases = run.tool.read(folder)
        except (ToolError, TimeoutError) as error:
            notes().print(str(error), style="red", markup=False, soft_wrap=True)
            return [Row(run=name, client=Counts(), server=Counts(), remarks=(str(error).partition("\n")[0],))]
        ends_s = [*(phase.began_s for phase in phases[1:]), None]
        return [
            Row(
                run=f"{name} {phase.name}".rstrip(),
                client=phase.seen,
                server=watch.between(phase.began_s, end_s),
                overhead_s=overhead_s,
                saturated=phase.saturated,
                unreported=phase.unreported,
                remarks=phase.remarks,
            )
            for phase, end_s in zip(phases, ends_s, strict=True)
        ]


async def _measure(home: Path, out: Path, tools: Path, plan: Sequence[Run]) -> list[Row]:
    tokenizer = out / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    write_word_tokenizer(tokenizer)
    fleet = Fleet(
        regions=1, nodes=1, models=1, instances_max=1, replay_speed=1.0,
        kv_tokens=KV_TOKENS, context_tokens=CONTEXT_TOKENS, tokenizer=tokenizer,
    )  # fmt: skip
    environment = {"TIDEPOOL_DATABASE_URL": "", "TIDEPOOL_REDIS_URL": "", "TIDEPOOL_SCALE_EVERY_S": "2"}
    stack = ReplayStack(home, fleet, environment=environment, wiring=Wiring(replicas={"forecaster": 0}))
    notes().print("starting a gateway and a replayed node")
    await asyncio.to_thread(stack.local.supervisor.start)
    try:
        await stack.register()
        await stack.wait_ready()
        [model] = fleet.model_names()
        async with bare_server() as url:
            gateway = Target(url=stack.local.url, key=stack.local.keys["client"], model=model, tokenizer=tokenizer)
            limited = replace(gateway, key=await _limited_key(stack))
            bare = replace(gateway, url=url, key="none")
            return await _Bench(tools=tools, out=out, gateway=gateway, limited=limited, bare=bare).rows(plan)
    finally:
        await asyncio.to_thread(stack.local.stop)


async def _limited_key(stack: ReplayStack) -> str:
    """A key of a tenant that may not send what the load generators do."""
    tenant = "limited"
    await stack.admin("PUT", f"/admin/tenants/{tenant}", json={"requests_per_minute": LIMITED_PER_MINUTE})
    made = await stack.admin("POST", "/admin/keys", json={"name": tenant, "role": "client", "tenant": tenant})
    return str(made["secret"])


def _both(name: str) -> Any:
    """A column that shows a count once if both sides have the same, and otherwise the client's and the server's."""

    def cell(row: dict[str, Any]) -> str:
        seen, counted = row["client"][name], row["server"][name]
        return f"{seen:,}" if seen == counted else f"{seen:,} / {counted:,}"

    return cell


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1e3 * value_s:.1f}"


def described(row: Row) -> dict[str, Any]:
    """A row for JSON and the table."""
    return asdict(row) | {
        "client_ttft_s": row.client.ttft_s,
        "server_ttft_s": row.server.ttft_s,
        "ttft_apart_s": row.ttft_apart_s,
        "itl_apart_s": row.itl_apart_s,
        "faults": faults(row),
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    columns: Columns = {
        "run": "run",
        "answered": _both("answered"),
        "errors": _both("errors"),
        "input tokens": _both("input_tokens"),
        "output tokens": _both("output_tokens"),
        "TTFT, ms": lambda row: f"{_ms(row['client_ttft_s'])} / {_ms(row['server_ttft_s'])}",
        "apart": lambda row: _ms(row["ttft_apart_s"]),
        "of it the client's": lambda row: _ms(row["overhead_s"]),
        "ITL apart": lambda row: _ms(row["itl_apart_s"]),
        "agree": lambda row: "; ".join(row["faults"]) or ("number of requests" if row["unreported"] else "yes"),
    }
    print_table("Load generator / gateway, once where they are equal; means", columns, rows)


def _schedule(
    trace: Path | None, name: str, out: Path, *, whole: bool, seconds: float, requests: int
) -> Schedule | None:
    if trace is None:
        notes().print("no --trace: the run with a trace's hour is left out")
        return None
    try:
        return write_schedule(
            trace, LISTINGS[name], out / "schedule.jsonl",
            seconds=seconds, requests_max=None if whole else requests, context_tokens=CONTEXT_TOKENS,
        )  # fmt: skip
    except (DemandFileError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error


def main(
    run: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(KINDS)}. May be repeated.")] = None,
    per_s: Annotated[
        list[float] | None, typer.Option(min=0.1, help="Rates of poisson. The middle one: the others'.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a run, but for the trace's.")] = 20.0,
    input_tokens: Annotated[int, typer.Option(min=1)] = 200,
    output_tokens: Annotated[int, typer.Option(min=2)] = 32,
    trace: Annotated[Path | None, typer.Option(dir_okay=False, exists=True, help="A trace, .gz too.")] = None,
    trace_format: Annotated[str, typer.Option(help=f"Of it: {', '.join(LISTINGS)}.")] = "azure-2023",
    trace_seconds: Annotated[float, typer.Option(min=1, help="What its first hour is compressed into.")] = 60.0,
    trace_requests: Annotated[int, typer.Option(min=1, help="What its first hour is thinned to.")] = 400,
    whole_hour: Annotated[bool, typer.Option("--whole-hour", help="The trace as it is: an hour.")] = False,
    seed: Annotated[int, typer.Option()] = 1,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where reports are kept.")] = Path("build/independent"),
    tools: Annotated[Path, typer.Option(file_okay=False, help="Where AIPerf and GuideLLM are installed.")] = TOOLS,
    as_json: AsJson = False,
) -> None:
    """Compare independent load generators with the gateway's own metrics. Exit status 1 if they do not agree.

    \b
    Examples:
      make bench-independent
      python -m ops.bench.independent.run --run poisson --per-s 2 --seconds 10 --json
      python -m ops.bench.independent.run --run trace --trace AzureLLMInferenceTrace_code.csv --whole-hour
    """
    kinds = chosen(run, KINDS, "--run")
    chosen([trace_format], LISTINGS, "--trace-format")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    takes_s = HOUR_S if whole_hour else trace_seconds
    file = None
    if "trace" in kinds:
        file = _schedule(trace, trace_format, out, whole=whole_hour, seconds=takes_s, requests=trace_requests)
    load = Load(input_tokens=input_tokens, output_tokens=output_tokens, seed=seed)
    rates = per_s or [4.0, 8.0, 16.0]
    plan = runs(kinds, load, rates=rates, seconds=seconds, schedule=None if file is None else (file, takes_s))
    if not plan:
        raise typer.BadParameter("nothing is left to run", param_hint="--run")
    results = {"load": asdict(load)} | _results(plan, out, tools.resolve())
    (out / "results.json").write_text(json.dumps(results, indent=2))
    if as_json:
        print_json(results)
    else:
        _print(results["rows"])
    if any(row["faults"] for row in results["rows"]):
        raise typer.Exit(1)


def _results(plan: Sequence[Run], out: Path, tools: Path) -> dict[str, Any]:
    """What all runs found, and how busy the machine was at their end."""
    try:
        for name in {run.tool.name for run in plan}:
            executable(tools, name)
    except ToolError as error:
        notes().print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    with work_folder() as home:
        rows = asyncio.run(_measure(home, out, tools, plan))
    busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if busy > cores:
        notes().print(f"{busy:.1f} processes wanted {cores} cores: what waits for one moves the times apart")
    return {
        "machine": {"cores": cores, "load_average": busy},
        "ttft_apart_max_s": APART_MAX_S,
        "rows": [described(row) for row in rows],
    }


if __name__ == "__main__":
    typer.run(main)
