"""The main job once, end to end, as a newcomer would do it by hand: fleet, interactive, batch, plan."""

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forecasts.synthetic import generate_demand
from ops.commands.api import Api, CommandError, open_api
from ops.commands.plans import show_plan
from ops.commands.screen import output
from ops.demo_fleet import NODES, REGIONS, live_instances, register_fleet
from ops.local import LocalStack
from ops.ports import free_port
from ops.tiny_models import TinyModel, build_tiny_models

ServiceTier = Literal["priority", "default"]
INTERACTIVE: tuple[tuple[str, ServiceTier], ...] = (("IW-F", "priority"), ("IW-N", "default"))
BATCH_REQUESTS = 200
DEMAND_DAYS = 7.0
DEMAND_SEED = 7
PEAK_TOKENS_PER_S = 9_000.0
_WAIT_S = 240.0
_POLL_S = 0.25


class DemoError(CommandError):
    """A step did not come out as it must; the message says how."""


@dataclass(kw_only=True)
class Demo:
    """What the steps share."""

    console: Console
    stack: LocalStack
    admin: Api
    client: openai.OpenAI
    models: list[TinyModel]
    took_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, title: str, words: str) -> Iterator[None]:
        """A numbered step: its title, plain words, and how long it took."""
        self.console.print(f"\n[bold cyan]{len(self.took_s) + 1}. {title}[/]  [dim]{words}[/]")
        began_s = time.monotonic()
        yield
        self.took_s[title] = time.monotonic() - began_s

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar; the block calls what it gets with how many are done."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)

    def wait(self, title: str, total: int, done: Callable[[], int]) -> None:
        """Show progress until `done()` reaches `total`.

        Raises:
            DemoError: it does not within four minutes.
        """
        deadline_s = time.monotonic() + _WAIT_S
        with self.progress(title, total) as show:
            while (count := done()) < total:
                show(count)
                if time.monotonic() > deadline_s:
                    raise DemoError(
                        f"{title}: {count} of {total} after {_WAIT_S:g} s; logs are in {self.stack.home}/logs"
                    )
                time.sleep(_POLL_S)
            show(total)


def main(*, demand: Path | None = None, keep: bool = False) -> None:
    """Run the demo in a home of its own, which is removed at the end unless `keep`.

    Raises:
        DemoError: a step failed.
    """
    console = output()
    began_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="tidepool-demo-"))
    console.print("[bold]Tidepool demo[/]: many models, one fleet, three regions, on this machine alone.")
    try:
        with console.status("Building four tiny models in Hugging Face format ..."):
            models = build_tiny_models(home / "models")
        stack = LocalStack(home, free_port(), NODES, report=lambda line: console.print(f"[dim]{line}[/]"))
        with console.status("Starting Postgres, Valkey, API, dispatcher, worker, beat and three node agents ..."):
            stack.supervisor.start()
        try:
            _steps(console, stack, models, demand)
        finally:
            with console.status("Stopping every process ..."):
                stack.stop()
    except BaseException:
        console.print(f"[red]The demo did not finish; its logs are in {home}/logs[/]")
        raise
    if keep:
        console.print(f"Its home is kept: {home}")
    else:
        shutil.rmtree(home)
    console.print(f"\n[bold green]Done[/] in {time.monotonic() - began_s:.0f} s; no process is left behind.")


def _steps(console: Console, stack: LocalStack, models: list[TinyModel], demand: Path | None) -> None:
    with (
        open_api(stack.url, stack.keys["admin"]) as admin,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.keys["client"]) as client,
    ):
        demo = Demo(console=console, stack=stack, admin=admin, client=client, models=models)
        set_up_fleet(demo)
        talk(demo)
        run_batch(demo)
        plan(demo, demand)
    times = ", ".join(f"{title.lower()} {took_s:.1f} s" for title, took_s in demo.took_s.items())
    console.print(f"\nTimes: {times}.")


def set_up_fleet(demo: Demo) -> None:
    """Register regions, GPU types, models and endpoints, and wait for one instance of each endpoint."""
    regions = ", ".join(f"{region.name} ({region.gpu_type})" for region in REGIONS)
    with demo.step("Fleet", f"{regions}; models {', '.join(model.name for model in demo.models)}"):
        register_fleet(demo.admin, demo.models)
        demo.wait("instances ready", len(demo.models) * len(REGIONS), lambda: len(_ready(demo)))


def talk(demo: Demo) -> None:
    """Stream a chat from every model, in both interactive tiers."""
    table = Table("model", "tier", "served in", "first token", "tokens", "text")
    with demo.step("Interactive", "the openai client streams chat completions in tiers IW-F and IW-N"):
        for number, model in enumerate(demo.models):
            tier, service_tier = INTERACTIVE[number % 2]
            said = _stream(demo.client, model.name, service_tier, REGIONS[number % len(REGIONS)].name)
            table.add_row(
                model.name, tier, said.region, f"{said.first_s * 1000:.0f} ms", str(said.tokens), said.text[:48]
            )
        demo.console.print(table)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What came out of a stream."""

    region: str
    first_s: float
    tokens: int
    text: str


def _stream(client: openai.OpenAI, model: str, service_tier: ServiceTier, region: str) -> Said:
    began_s = time.monotonic()
    first_s = 0.0
    text: list[str] = []
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How does the tide know when to come?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        service_tier=service_tier,
        extra_headers={"x-tidepool-region": region},
    )
    with stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.monotonic() - began_s
                text.append(chunk.choices[0].delta.content)
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        served = stream.response.headers["x-tidepool-region"]
    if tokens == 0:
        raise DemoError(f"{model} made no token")
    return Said(region=served, first_s=first_s, tokens=tokens, text="".join(text).replace("\n", " "))


def run_batch(demo: Demo) -> None:
    """Upload 200 requests, wait for the batch, and check that every line has exactly one result."""
    with demo.step("Batch", f"{BATCH_REQUESTS} deferred requests (NIW) over all models, released into spare capacity"):
        lines = [_batch_line(number, demo.models[number % len(demo.models)].name) for number in range(BATCH_REQUESTS)]
        uploaded = demo.client.files.create(file=("demo.jsonl", "".join(lines).encode()), purpose="batch")
        batch = demo.client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def finished() -> int:
            nonlocal batch
            batch = demo.client.batches.retrieve(batch.id)
            if batch.status in {"failed", "expired", "cancelled"}:
                raise DemoError(f"the batch is {batch.status}: {batch.errors}")
            counts = batch.request_counts
            done = 0 if counts is None else counts.completed + counts.failed
            return done if batch.status == "completed" else min(done, BATCH_REQUESTS - 1)

        demo.wait("results", BATCH_REQUESTS, finished)
        if batch.output_file_id is None or batch.error_file_id is not None:
            raise DemoError(f"the batch has errors: {batch}")
        output = demo.client.files.content(batch.output_file_id).text.splitlines()
        results = Counter(json.loads(line)["custom_id"] for line in output)
        if set(results.values()) != {1} or len(results) != BATCH_REQUESTS:
            raise DemoError(f"{len(results)} of {BATCH_REQUESTS} requests have results, not one each")
        demo.console.print(f"   {len(output)} output lines, one for each of {BATCH_REQUESTS} requests, no errors.")


def _batch_line(number: int, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me about wave number {number}."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    line = {"custom_id": f"wave-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line) + "\n"


def plan(demo: Demo, demand: Path | None) -> None:
    """Import a week of demand, forecast the next hour, solve the placement, show it, apply it, and see it followed."""
    with demo.step("Plan", "a week of demand per minute -> forecast of the next hour -> placement -> instances"):
        text = _generated_demand(demo.models) if demand is None else demand.read_text()
        imported = demo.admin.send("POST", "/admin/demand", content=text, headers={"Content-Type": "text/csv"})
        demo.console.print(f"   imported {imported['rows']:,} minutes of demand in {imported['series']} series.")
        origin_s = imported["last_s"] + 60
        _forecast(demo, imported["series"], origin_s)
        while not _plan_once(demo, origin_s):
            demo.console.print("   the fleet changed meanwhile, by the schedule's own plan perhaps; planning again.")
        _follow(demo)


def _plan_once(demo: Demo, origin_s: float) -> bool:
    """Draft, show, apply; False if the fleet changed between the first and the last."""
    draft = demo.admin.post("/admin/plans", {"origin_s": origin_s})
    show_plan(draft)
    try:
        demo.admin.post(f"/admin/plans/{draft['plan']['id']}/apply", {"index": draft["index"]})
    except CommandError as error:
        if error.status == HTTPStatus.CONFLICT:
            return False
        raise
    return True


def _plan_in_force(demo: Demo) -> dict[tuple[str, str], int]:
    """Instances by (model, region), as the plan in force has them."""
    plans = demo.admin.get("/admin/plans")["data"]
    applied = next(plan["id"] for plan in plans if plan["state"] == "applied")
    entries = demo.admin.get(f"/admin/plans/{applied}")["entries"]
    return {(entry["model"], entry["region"]): entry["after"] for entry in entries if entry["after"]}


def _generated_demand(models: list[TinyModel]) -> str:
    start_s = int(time.time()) // 60 * 60 - DEMAND_DAYS * 86_400
    rows = generate_demand(
        [region.name for region in REGIONS],
        [model.name for model in models],
        DEMAND_DAYS,
        DEMAND_SEED,
        start_s=start_s,
        peak_tokens_per_s=PEAK_TOKENS_PER_S,
        utc_offsets_h={region.name: region.utc_offset_h for region in REGIONS},
    )
    lines = ("" if r.tokens_per_s is None else f"{r.tokens_per_s:.2f}" for r in rows)
    body = "".join(f"{int(r.start_s)},{r.region},{r.model},{value}\n" for r, value in zip(rows, lines, strict=True))
    return "start_s,region,model,tokens_per_s\n" + body


def _forecast(demo: Demo, series: int, origin_s: int) -> None:
    demo.admin.post("/admin/forecasts/run", {"origin_s": origin_s})
    demo.wait("forecasts", series, lambda: len(demo.admin.get("/admin/forecasts", origin_s=origin_s)["data"]))
    forecasts = demo.admin.get("/admin/forecasts", origin_s=origin_s)["data"]
    chosen = Counter(forecast["forecaster"] for forecast in forecasts)
    words = ", ".join(f"{name} for {count}" for name, count in chosen.most_common())
    peak = sum(forecast["peak_upper"] for forecast in forecasts)
    demo.console.print(f"   chosen by backtest: {words}; peaks of the next hour add up to {peak:,.0f} tokens/s.")


def _follow(demo: Demo) -> None:
    """Wait until the agents hold what the plan in force says, then see that requests go there."""
    cells = [(model.name, region.name) for model in demo.models for region in REGIONS]

    def matching() -> int:
        planned, live = _plan_in_force(demo), live_instances(demo.admin)
        if any(row["desired"] != "running" for row in live):
            return 0
        ready = Counter((row["model"], row["region"]) for row in live if row["observed"] == "ready")
        return sum(ready[cell] == planned.get(cell, 0) for cell in cells)

    demo.wait("endpoints as planned", len(cells), matching)
    planned = _plan_in_force(demo)
    served: Counter[str] = Counter()
    for model, region in sorted(planned):
        said = _stream(demo.client, model, "default", region)
        if (model, said.region) not in planned:
            raise DemoError(f"{model} was served in {said.region}, where the plan has none")
        served[said.region] += 1
    words = ", ".join(f"{count} in {region}" for region, count in sorted(served.items()))
    demo.console.print(f"   the agents hold the plan; the next requests were served {words}.")


def _ready(demo: Demo) -> list[dict[str, Any]]:
    return [row for row in live_instances(demo.admin) if row["observed"] == "ready"]
