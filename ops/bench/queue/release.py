"""Batches at the speed of the hardware: lines a second through the batch queue, as a share of what the same instances
make of the same lines when these are sent to them directly.

Each number of instances gets a stack of its own (gateway, dispatchers, Postgres, Valkey, agents with replayed workers)
and no other load. Directly, as many lines are in flight at each instance as the queue may keep there, and the next one
is sent when one ends. The two ways alternate, and begin in turn. A batch counts from its creation until its last line
has ended, validation and the growth of its window included, so short batches have the smaller share.

Replayed instances keep the times of an H800 over `--replay-speed`. It has to be so low that the instances are the
bottleneck, and not the machine, which runs all processes: compare `busy`, the CPU seconds a second of all processes but
this one, with its cores. More dispatchers help where `dispatcher` is near 1 for each.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx2 as httpx
import typer
from pydantic import SecretStr

from controlplane.serving.agent_client import AgentClient
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import add_instance, touch_generations
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Model
from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.messages import Finished, Generate, Sampling
from dataplane.protocol.tiers import Tier
from ops.bench.shared import cpu_s, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table, progress_bar
from ops.local.ports import free_port
from ops.local.replay_stack import CONTEXT_TOKENS, GPU_TYPE, KV_SHARE, NODE_BYTES, WEIGHTS_BYTES
from ops.local.sample_fleet import PROFILES
from ops.local.stack import LocalNode, LocalStack, Wiring
from ops.local.waiting import wait_until

MODEL, REGION = "tide", "here"
KV_TOKENS = 400_000
WORKERS_OF_AGENT = 8
QUEUE_SHARE = Settings.model_fields["release_queue_share"].default
SHARE_MIN = 0.95
READY_TIMEOUT_S = 300.0
LOOK_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Load:
    """A batch of `lines` prompts of `words` words, with answers of `tokens`; and how many sequences an instance runs at
    once. `prefixes`: so many beginnings, of `prefix_words` more words, that the lines have in turn; others each `run`.
    """

    lines: int
    words: int
    tokens: int
    batch_max: int
    prefixes: int = 0
    prefix_words: int = 0

    def prompt(self, line: int, run: int = 0) -> str:
        prompt = " ".join(["tide", str(line), *["wave"] * (self.words - 2)])
        if not self.prefixes:
            return prompt
        words = random.Random(f"{run} {line % self.prefixes}").choices(WORDS, k=self.prefix_words)
        return " ".join([*words, prompt])

    @property
    def in_flight(self) -> int:
        """At each instance."""
        return int(self.batch_max * (1 + QUEUE_SHARE))


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round with so many instances. `*_cached`: the share of prompt tokens that were in a prefix cache. CPU seconds
    a second during the batch: of the dispatchers, and of all `busy` processes.
    """

    instances: int
    lines: int
    direct_s: float
    batch_s: float
    direct_cached: float
    batch_cached: float
    dispatcher: float
    busy: float

    @property
    def share(self) -> float:
        return self.direct_s / self.batch_s


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the rounds with so many instances; `*_per_s` in lines, `*_cached` as in a round."""

    instances: int
    lines: int
    direct_per_s: float
    batch_per_s: float
    share: float
    direct_cached: float
    batch_cached: float
    dispatcher: float
    busy: float


def rows(rounds: Sequence[Round]) -> list[Row]:
    """One row for each number of instances."""
    found = []
    for instances, grouped in itertools.groupby(rounds, key=lambda each: each.instances):
        mine = list(grouped)
        found.append(
            Row(
                instances=instances,
                lines=mine[0].lines,
                direct_per_s=median(each.lines / each.direct_s for each in mine),
                batch_per_s=median(each.lines / each.batch_s for each in mine),
                share=median(each.share for each in mine),
                direct_cached=median(each.direct_cached for each in mine),
                batch_cached=median(each.batch_cached for each in mine),
                dispatcher=median(each.dispatcher for each in mine),
                busy=median(each.busy for each in mine),
            )
        )
    return found


def nodes(instances: int, load: Load, replay_speed: float) -> tuple[LocalNode, ...]:
    """Agents with a worker for each instance."""
    agents = math.ceil(instances / WORKERS_OF_AGENT)
    counts = [len(range(number, instances, agents)) for number in range(agents)]
    return tuple(
        LocalNode(
            name=f"n{number:02}",
            region=REGION,
            gpu_type=GPU_TYPE,
            gpus=1,
            memory_bytes=NODE_BYTES,
            engine="replay",
            profile=PROFILES / f"{GPU_TYPE.lower()}.toml",
            settings={
                "slots": json.dumps([{"gpus": 1, "memory_bytes": NODE_BYTES}] * count),
                "replay_speed": replay_speed,
                "kv_share": KV_SHARE,
                "batch_max": load.batch_max,
            },
        )
        for number, count in enumerate(counts)
    )


class _Bench:
    """One stack. Its planner and autoscaler do not run, so that its instances stay as they are."""

    def __init__(self, home: Path, instances: int, load: Load, replay_speed: float, dispatchers: int) -> None:
        self._instances = instances
        self._load = load
        self._nodes = nodes(instances, load, replay_speed)
        idle = {"worker": 0, "forecaster": 0, "beat": 0}
        self._stack = LocalStack(
            home,
            free_port(),
            self._nodes,
            environment={"TIDEPOOL_DATABASE_URL": "", "TIDEPOOL_REDIS_URL": ""},
            wiring=Wiring(replicas=idle | {"dispatcher": dispatchers}),
        )
        self._settings = Settings(
            database_url=SecretStr(self._stack.database_url),
            redis_url=SecretStr(self._stack.redis_url),
            home=home,
            node_key=SecretStr(self._stack.keys["node"]),
        )
        self._number = itertools.count()
        self._runs = itertools.count()

    async def run(self, rounds: int) -> list[Round]:
        """All rounds, after a few lines of both ways."""
        await asyncio.to_thread(self._stack.supervisor.start)
        try:
            await asyncio.to_thread(self._offer)
            if not await wait_until(self._are_joined, READY_TIMEOUT_S):
                raise TimeoutError(f"not all nodes have joined after {READY_TIMEOUT_S:g} s")
            await asyncio.to_thread(self._place)
            if not await wait_until(self._are_ready, READY_TIMEOUT_S):
                raise TimeoutError(f"not all instances are ready after {READY_TIMEOUT_S:g} s")
            few = self._instances * self._load.in_flight
            await self._direct(few)
            await self._batch(few)
            return [await self._round(number) for number in range(rounds)]
        finally:
            await asyncio.to_thread(self._stack.stop)

    def _offer(self) -> None:
        database = Database(make_engine(self._settings))
        with database.transaction() as session:
            fleet.put_region(session, name=REGION, position=None)
            fleet.put_gpu_type(session, name=GPU_TYPE, memory_bytes=80 << 30, cost_per_hour=2.0)
            fleet.put_model(
                session,
                Model(
                    name=MODEL,
                    path=f"/replay/{MODEL}",
                    architecture="Replay",
                    weights_bytes=WEIGHTS_BYTES,
                    kv_bytes_per_token=int(NODE_BYTES * KV_SHARE) // KV_TOKENS,
                    context_tokens=CONTEXT_TOKENS,
                ),
            )
            fleet.put_endpoint(session, model=MODEL, region=REGION, minimum=0, maximum=self._instances)
        database.close()

    def _place(self) -> None:
        database = Database(make_engine(self._settings))
        with database.transaction() as session:
            for node in self._nodes:
                for slot in range(len(json.loads(str(node.settings["slots"])))):
                    add_instance(
                        session, model=MODEL, region=REGION, gpu_type=GPU_TYPE, node=node.name, slot=slot, gpus=1
                    )
            touch_generations(session, [node.name for node in self._nodes])
        database.close()

    async def _are_joined(self) -> bool:
        live = LiveStore(self._settings)
        view = await asyncio.to_thread(live.read_view)
        live.close()
        return len(view.nodes) == len(self._nodes)

    async def _are_ready(self) -> bool:
        return len(await asyncio.to_thread(self._ready)) == self._instances

    def _ready(self) -> list[tuple[str, str]]:
        """Address and id of each instance that is ready."""
        live = LiveStore(self._settings)
        view = live.read_view()
        live.close()
        return [
            (node.url, report.instance_id)
            for node in view.nodes.values()
            for report in node.heartbeat.instances
            if report.state == "ready"
        ]

    async def _round(self, number: int) -> Round:
        direct = await self._direct(self._load.lines) if number % 2 == 0 else None
        before = self._cpu_s()
        batch_s, batch_cached = await self._batch(self._load.lines)
        after = self._cpu_s()
        used_s = {name: after[name] - before[name] for name in before}
        direct_s, direct_cached = direct or await self._direct(self._load.lines)
        found = Round(
            instances=self._instances,
            lines=self._load.lines,
            direct_s=direct_s,
            batch_s=batch_s,
            direct_cached=direct_cached,
            batch_cached=batch_cached,
            dispatcher=sum(spent_s for name, spent_s in used_s.items() if name.startswith("dispatcher")) / batch_s,
            busy=sum(used_s.values()) / batch_s,
        )
        notes().print(
            f"{found.instances} instances, round {number + 1}: direct {found.direct_s:.1f} s,"
            f" batch {found.batch_s:.1f} s, share {found.share:.3f}, of prompts cached {direct_cached:.1%} and"
            f" {batch_cached:.1%}, dispatchers {found.dispatcher:.2f} and all {found.busy:.2f} CPU seconds a second"
        )
        return found

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._stack.supervisor.pids().items()}

    async def _direct(self, lines: int) -> tuple[float, float]:
        """Seconds for so many lines, each sent to the next instance that is free, and the share of tokens cached."""
        agents, run, ends = AgentClient(self._settings), next(self._runs), list[Finished]()
        waiting: Iterator[int] = iter(range(lines))
        with progress_bar("lines") as show:

            async def feed(url: str, instance_id: str) -> None:
                for line in waiting:
                    ends.append(await _answered(agents, url, self._request(line, run, instance_id)))
                    show(f"directly to {self._instances}", len(ends), lines)

            started_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for url, instance_id in self._ready():
                    for _ in range(self._load.in_flight):
                        group.create_task(feed(url, instance_id))
            took_s = time.monotonic() - started_s
        await agents.close()
        return took_s, sum(end.cached_tokens for end in ends) / sum(end.prompt_tokens for end in ends)

    def _request(self, line: int, run: int, instance_id: str) -> Generate:
        return Generate(
            request_id=f"direct-{next(self._number)}",
            instance_id=instance_id,
            model=MODEL,
            tier=Tier.NIW,
            prompt=self._load.prompt(line, run),
            sampling=Sampling(max_tokens=self._load.tokens, temperature=0.0, ignore_eos=True),
        )

    async def _batch(self, lines: int) -> tuple[float, float]:
        """Seconds for so many lines, through the queue, and the share of tokens cached."""
        run = next(self._runs)
        headers = {"Authorization": f"Bearer {self._stack.keys['client']}"}
        asked = {"model": MODEL, "max_tokens": self._load.tokens, "temperature": 0, "ignore_eos": True}
        content = "\n".join(
            json.dumps(
                {
                    "custom_id": f"r{line}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": asked | {"prompt": self._load.prompt(line, run)},
                }
            )
            for line in range(lines)
        )
        async with httpx.AsyncClient(base_url=self._stack.url, headers=headers, timeout=60, trust_env=False) as client:
            file = {"file": ("in.jsonl", content.encode(), "application/jsonl")}
            file_id = (await _call(client, "POST", "/v1/files", files=file, data={"purpose": "batch"}))["id"]
            about = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
            started_s = time.monotonic()
            batch_id = (await _call(client, "POST", "/v1/batches", json=about))["id"]
            with progress_bar("lines") as show:
                while True:
                    batch = await _call(client, "GET", f"/v1/batches/{batch_id}")
                    counts = batch["request_counts"]
                    show(f"through the queue to {self._instances}", counts["completed"], lines)
                    if counts["failed"] or batch["status"] in {"failed", "expired", "cancelled"}:
                        raise RuntimeError(f"the batch failed: {batch}")
                    if counts["completed"] == lines:
                        took_s = time.monotonic() - started_s
                        break
                    await asyncio.sleep(LOOK_EVERY_S)
            while batch["status"] != "completed":
                await asyncio.sleep(LOOK_EVERY_S)
                batch = await _call(client, "GET", f"/v1/batches/{batch_id}")
            output = await client.get(f"/v1/files/{batch['output_file_id']}/content")
        usages = [json.loads(each)["response"]["body"]["usage"] for each in output.raise_for_status().text.splitlines()]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return took_s, cached / sum(usage["prompt_tokens"] for usage in usages)


async def _answered(agents: AgentClient, url: str, request: Generate) -> Finished:
    [end] = [event async for events in agents.generate(url, request) for event in events if isinstance(event, Finished)]
    return end


async def _call(client: httpx.AsyncClient, method: str, path: str, **request: Any) -> dict[str, Any]:
    answer = await client.request(method, path, **request)
    answer.raise_for_status()
    content: dict[str, Any] = answer.json()
    return content


def main(
    instances: Annotated[list[int] | None, typer.Option(min=1, help="Instances; may be repeated.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Lines of a batch.")] = 50_000,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    words: Annotated[int, typer.Option(min=2, help="Words of a prompt.")] = 60,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 8,
    batch_max: Annotated[int, typer.Option(min=1, help="Sequences that an instance runs at once.")] = 32,
    replay_speed: Annotated[float, typer.Option(min=0.001, help="1: as fast as an H800.")] = 0.05,
    dispatchers: Annotated[int, typer.Option(min=1, help="Processes that release.")] = 1,
    prefixes: Annotated[int, typer.Option(min=0, help="Beginnings that prompts have in turn.")] = 0,
    prefix_words: Annotated[int, typer.Option(min=1, help="Words of a beginning.")] = 400,
    home: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to run in and to keep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what share of their speed instances keep behind the queue. Exit status 1 if one is below 0.95.

    \b
    Examples:
      python -m ops.bench.queue.release
      python -m ops.bench.queue.release --instances 4 --lines 2000 --rounds 1 --json
      python -m ops.bench.queue.release --instances 4 --lines 800 --prefixes 8
    """
    load = Load(
        lines=lines,
        words=words,
        tokens=tokens,
        batch_max=batch_max,
        prefixes=prefixes,
        prefix_words=prefix_words if prefixes else 0,
    )
    rounds_found: list[Round] = []
    with work_folder(home) as folder:
        for count in instances or [1, 4, 16]:
            bench = _Bench(folder / str(count), count, load, replay_speed, dispatchers)
            rounds_found += asyncio.run(bench.run(rounds))
    found = rows(rounds_found)
    if as_json:
        print_json({"load": asdict(load), "rows": list(map(asdict, found)), "rounds": list(map(asdict, rounds_found))})
    else:
        columns: Columns = {
            "instances": "instances",
            "lines": "lines",
            "directly": lambda row: f"{row['direct_per_s']:.1f}/s",
            "through the queue": lambda row: f"{row['batch_per_s']:.1f}/s",
            "share": lambda row: f"{row['share']:.3f}",
            "of prompts cached, directly": lambda row: f"{row['direct_cached']:.1%}",
            "and through the queue": lambda row: f"{row['batch_cached']:.1%}",
            "dispatchers": lambda row: f"{row['dispatcher']:.2f} cores",
            "all processes": lambda row: f"{row['busy']:.2f} cores",
        }
        print_table(f"A batch on idle instances, medians of {rounds} rounds", columns, map(asdict, found))
    if any(row.share < SHARE_MIN for row in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
