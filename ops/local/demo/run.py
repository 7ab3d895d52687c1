"""The main job once, end to end, as a newcomer would do it by hand: fleet, interactive, pool, batch, plan."""

import contextlib
import json
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from ops.client.api import open_api
from ops.client.console import sign_in_link
from ops.client.screen import output
from ops.local.demo.plan import plan
from ops.local.demo.pool import pool
from ops.local.demo.stage import Demo, DemoError, ServiceTier, ask
from ops.local.ports import free_port
from ops.local.pretrained import SMOLLM2, pretrained_model
from ops.local.sample_fleet import REGIONS, live_instances, make_nodes, regions_of, register_fleet
from ops.local.stack import LocalStack
from ops.local.tiny_models import TinyModel, build_tiny_models

INTERACTIVE: tuple[tuple[str, ServiceTier], ...] = (("IW-F", "priority"), ("IW-N", "default"))
BATCH_REQUESTS = 200
PRETRAINED_TOKENS = 48
SIMPLE_QUESTION = "What is the capital of France?"


def main(*, demand: Path | None = None, keep: bool = False, tiny: bool = False) -> None:
    """Run the demo in a home of its own, which is removed at the end. `keep`: its processes run on until Ctrl-C, and
    the home stays; `tiny`: without the pretrained model.

    Raises:
        DemoError: a step failed.
    """
    console = output()
    began_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="tidepool-demo-"))
    console.print("[bold]Tidepool demo[/]: many models, one fleet, three regions, on this machine alone.")
    try:
        with console.status("Building eight tiny models in Hugging Face format ..."):
            models = build_tiny_models(home / "models")
        pretrained = None if tiny else pretrained_model(lambda line: console.print(line, markup=False))
        nodes = make_nodes(models, pretrained)
        stack = LocalStack(
            home,
            free_port(),
            nodes,
            report=lambda line: console.print(f"[dim]{line}[/]"),
        )
        with console.status("Starting Postgres, Valkey, API, dispatcher, worker, beat and three node agents ..."):
            stack.supervisor.start()
        try:
            _steps(console, stack, models, pretrained, demand)
            if keep:
                _wait(console, stack)
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


def _wait(console: Console, stack: LocalStack) -> None:
    """Let the stack run until Ctrl-C, and say where its console is."""
    with open_api(stack.url, stack.keys["admin"]) as admin:
        console.print(f"\nThe console, signed in by a link that works once: {sign_in_link(admin)}", soft_wrap=True)
    console.print("Everything runs on until Ctrl-C.")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)


def _steps(
    console: Console, stack: LocalStack, models: list[TinyModel], pretrained: TinyModel | None, demand: Path | None
) -> None:
    with (
        open_api(stack.url, stack.keys["admin"]) as admin,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.keys["client"]) as client,
    ):
        demo = Demo(console=console, stack=stack, admin=admin, client=client, models=models, pretrained=pretrained)
        set_up_fleet(demo)
        talk(demo)
        pool(demo)
        run_batch(demo)
        plan(demo, demand)
    times = ", ".join(f"{title.lower()} {took_s:.1f} s" for title, took_s in demo.took_s.items())
    console.print(f"\nTimes: {times}.")


def set_up_fleet(demo: Demo) -> None:
    """Register regions, GPU types, models and endpoints, and wait for one instance of each endpoint."""
    regions = ", ".join(f"{region.name} ({region.gpu_type})" for region in REGIONS)
    with demo.step("Fleet", f"{regions}; models {', '.join(model.name for model in demo.offered)}"):
        register_fleet(demo.admin, demo.offered)
        wanted = sum(len(regions_of(model.name)) for model in demo.offered)
        demo.wait("instances ready", wanted, lambda: len(_ready(demo)))


def talk(demo: Demo) -> None:
    """Stream a chat from every model, in both interactive tiers."""
    table = Table("model", "tier", "served in", "first token", "tokens", "text")
    with demo.step("Interactive", "the openai client streams chat completions in tiers IW-F and IW-N"):
        for number, model in enumerate(demo.models):
            tier, service_tier = INTERACTIVE[number % 2]
            regions = regions_of(model.name)
            answer = ask(demo.client, model.name, regions[number % len(regions)].name, service_tier=service_tier)
            table.add_row(
                model.name,
                tier,
                answer.region,
                f"{answer.waited_s * 1000:.0f} ms",
                str(answer.tokens),
                answer.text[:48],
            )
        demo.console.print(table)
        if demo.pretrained is not None:
            _stream_pretrained(demo, demo.pretrained)


def _stream_pretrained(demo: Demo, model: TinyModel) -> None:
    """Stream an answer to the terminal."""
    [region] = regions_of(model.name)
    demo.console.print(f"   [bold]{SIMPLE_QUESTION}[/]  ", end="")
    answer = ask(
        demo.client,
        model.name,
        region.name,
        max_tokens=PRETRAINED_TOKENS,
        question=SIMPLE_QUESTION,
        on_text=lambda text: demo.console.print(text, end="", markup=False, style="green"),
    )
    rate = answer.tokens / (answer.ended_s - answer.began_s)
    demo.console.print(
        f"\n   [dim]{SMOLLM2.about}, {answer.tokens} tokens from {answer.region}, {rate:.0f} tokens/s[/]"
    )


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


def _ready(demo: Demo) -> list[dict[str, Any]]:
    return [row for row in live_instances(demo.admin) if row["state"] == "ready"]
