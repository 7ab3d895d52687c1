"""The same small scenario, run live and simulated: the error of the simulator.

Live: a whole stack of real processes on this machine, with one node on the replay engine whose one slot has memory for
two of three models. Simulated: a pool of that slot. Both get the same requests at the same times, after each model was
asked once: so both begin with the same models on the slot.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2 as httpx
import numpy as np
import tomlkit
import typer
from msgspec.structs import replace

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from ops.bench.independent.tools import TOOLS, ToolError
from ops.bench.papers.live_clients import (
    SERVICE_TIERS,
    TIMEOUT_S,
    AiperfClient,
    Answer,
    Client,
    Gateway,
    send_ourselves,
)
from ops.bench.shared import work_folder
from ops.client.api import Api, open_api
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.local.ports import free_port
from ops.local.sample_fleet import live_instances
from ops.local.stack import LocalNode, LocalStack
from ops.local.waiting import wait_until
from ops.local.word_tokenizer import write_word_tokenizer
from ops.simulator.kernel.requests import Request
from ops.simulator.results.results import Quantiles
from ops.simulator.results.results import Row as TierRow
from ops.simulator.run import simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.scenario import PROFILES, Scenario

REGION, GPU_TYPE, NODE = "here", "H800", "n1"
PROFILE = PROFILES / f"{GPU_TYPE.lower()}.toml"
MEMORY_BYTES, KV_SHARE = 80 * 10**9, 0.25
BATCH_MAX = 32
MODELS = {"13b": (27_793_336_320, 819_200), "7b": (15_231_233_024, 57_344), "14b": (28_334_581_760, 819_200)}
"""Weights, and KV of a token, in bytes."""
READY_TIMEOUT_S, LOOK_EVERY_S = 300.0, 0.25
WARM_UP_S = 60.0
"""In the simulated world requests come so much later."""
TTFT_S = 600.0
"""When a first token is due in both worlds: so late that nobody is refused, for the simulated world refuses nobody."""
PATIENT = dict.fromkeys(("TIDEPOOL_SLO_IW_F_TTFT_S", "TIDEPOOL_SLO_IW_N_TTFT_S"), f"{TTFT_S:g}")


@dataclass(kw_only=True)
class Watch:
    """What the node's slot has done: turns as they end, and how often it switched."""

    busy_s: float = 0.0
    switches: int = 0
    _last: list[tuple[Any, ...]] = field(default_factory=list)
    _switches_before: int | None = None

    def look(self, slot: dict[str, Any]) -> None:
        """Take the newest time slices. Those of the last look are recognised by their lengths, which do not change."""
        if self._switches_before is None:
            self._switches_before = slot["switches_total"]
        self.switches = slot["switches_total"] - self._switches_before
        turns = [] if slot["pool"] is None else slot["pool"]["turns"]
        new = [
            (turn["kind"], turn["model"], turn["tokens"], round(turn["started_age_s"] - turn["ended_age_s"], 6))
            for turn in turns
        ]
        known = next((size for size in range(len(new), 0, -1) if self._last[-size:] == new[:size]), 0)
        self.busy_s += sum(turn[-1] for turn in new[known:])
        self._last = new or self._last


async def warm_up(gateway: Gateway) -> None:
    """Ask each model once, so that all of them are in host memory, and the slot has what it has in `simulated`."""
    for request in warm_ups(Tier.IW_N):
        await send_ourselves(gateway, [replace(request, arrived_s=0.0)])


def warm_ups(tier: Tier) -> list[Request]:
    """A short request to each model, each after the one before is answered."""
    return [
        Request(
            number=number,
            arrived_s=number * WARM_UP_S / (len(MODELS) + 1),
            model=model,
            origin=REGION,
            tier=tier,
            prompt_tokens=20,
            output_tokens=2,
        )
        for number, model in enumerate(MODELS)
    ]


@asynccontextmanager
async def watching(url: str, key: str) -> AsyncIterator[Watch]:
    """Watch a node's slot, busy from now on; until the end of the context, and what has happened by then."""
    watch = Watch()
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as node:

        async def look() -> None:
            watch.look((await node.get("/state")).raise_for_status().json()["slots"][0])

        async def keep_looking() -> None:
            while not over.is_set():
                await look()
                await asyncio.sleep(LOOK_EVERY_S)

        await look()
        watch.busy_s, over = 0.0, asyncio.Event()
        looking = asyncio.create_task(keep_looking())
        try:
            yield watch
        finally:
            over.set()
            await looking
        await look()


def register(admin: Api, tokenizer: Path) -> None:
    """Tell the control plane of the fleet: one instance of each model, all with the same tokenizer."""
    admin.put(f"/admin/regions/{REGION}", {"position": 0})
    admin.put(f"/admin/gpu-types/{GPU_TYPE}", {"memory_bytes": 80 * 2**30, "cost_per_hour": 2.5})
    for name, (weights, kv) in MODELS.items():
        about = {"path": str(tokenizer), "architecture": "Replay", "weights_bytes": weights}
        admin.put(f"/admin/models/{name}", about | {"kv_bytes_per_token": kv, "context_tokens": 8192})
        profile = {"model": name, "gpu_type": GPU_TYPE, "tokens_per_s": 2500.0, "gpus": 1, "load_time_s": 10.0}
        admin.put("/admin/profiles", profile)
        admin.put("/admin/endpoints", {"model": name, "region": REGION, "instances_min": 1, "instances_max": 1})


async def live(
    home: Path, requests: Sequence[Request], speed: float, client: Client, tokenizer: Path
) -> tuple[list[Answer], Watch]:
    """Start a stack, have a client send the requests, stop it."""
    node = LocalNode(
        name=NODE,
        region=REGION,
        gpu_type=GPU_TYPE,
        gpus=len(MODELS),
        memory_bytes=MEMORY_BYTES,
        engine="replay",
        profile=PROFILE,
        settings={"kv_share": KV_SHARE, "batch_max": BATCH_MAX, "replay_speed": speed},
    )
    environment = {"TIDEPOOL_DATABASE_URL": "", "TIDEPOOL_REDIS_URL": "", "TIDEPOOL_SCALE_EVERY_S": "2", **PATIENT}
    stack = LocalStack(home, free_port(), (node,), environment=environment)
    await asyncio.to_thread(stack.supervisor.start)
    try:
        with open_api(stack.url, stack.keys["admin"]) as admin:
            await asyncio.to_thread(register, admin, tokenizer)

            async def is_ready() -> bool:
                rows = await asyncio.to_thread(live_instances, admin)
                return len([row for row in rows if row["state"] == "ready"]) == len(MODELS)

            if not await wait_until(is_ready, READY_TIMEOUT_S):
                raise TimeoutError(f"not every instance was ready after {READY_TIMEOUT_S:g} s")
            gateway = Gateway(url=stack.url, key=stack.keys["client"])
            await warm_up(gateway)
            node_url = admin.get(f"/admin/nodes/{NODE}")["url"]
            async with watching(node_url, stack.keys["node"]) as watch:
                answers = await client(gateway, requests)
            return answers, watch
    finally:
        await asyncio.to_thread(stack.stop)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What the simulated slot did after it was warm. `tiers`: of the requests since then; `took_s`: until the last of
    them ended.
    """

    tiers: Sequence[TierRow]
    switches: int
    busy_s: float
    took_s: float


def simulated(scenario: Scenario, requests: Sequence[Request]) -> Simulated:
    """Serve requests on a slot that was asked for each model once before, by deferred requests: they have own rows."""
    before = warm_ups(Tier.NIW)
    after = [
        replace(one, number=number, arrived_s=one.arrived_s + WARM_UP_S)
        for number, one in enumerate(requests, start=len(before))
    ]
    warm, whole = (simulate(scenario, traffic=traffic).result for traffic in (before, [*before, *after]))
    assert warm.simulated_s < WARM_UP_S
    return Simulated(
        tiers=[row for row in whole.tiers if row.tier in SERVICE_TIERS],
        switches=whole.totals.switches - warm.totals.switches,
        busy_s=whole.busy_share * whole.simulated_s - warm.busy_share * warm.simulated_s,
        took_s=whole.simulated_s - WARM_UP_S,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of both. `slowed`: simulated again with steps and transfers that take as much longer as the live slot
    was busier for the same work: what then differs is no matter of this machine's speed.
    """

    name: str
    live: float
    simulated: float
    slowed: float

    @property
    def difference(self) -> float:
        """The simulated figure over the live one, less 1."""
        return self.simulated / self.live - 1 if self.live else 0.0

    @property
    def slowed_difference(self) -> float:
        return self.slowed / self.live - 1 if self.live else 0.0


def scenario(seconds: float, rate_per_s: float, seed: int, profile: Path) -> Scenario:
    """The scenario of both."""
    lengths = {"spread": 0.6, "most": 2000}
    return Scenario.model_validate(
        {
            "name": "three models on a slot for two",
            "seed": seed,
            "regions": [REGION],
            "targets": {
                tier: {"ttft_s": TTFT_S, "tbt_s": objective.tbt_s}
                for tier, objective in TIER_OBJECTIVES.items()
                if tier in SERVICE_TIERS
            },
            "traffic": {
                "kind": "generated",
                "rate_per_s": rate_per_s,
                "duration_s": seconds,
                "origins": {REGION: 1},
                "tiers": dict.fromkeys(SERVICE_TIERS, 1),
                "prompt_tokens": {"median": 400, **lengths},
                "output_tokens": {"median": 80, **lengths},
            },
            "models": [
                {"name": name, "weights_bytes": weights, "kv_bytes_per_token": kv, "context_tokens": 8192}
                for name, (weights, kv) in MODELS.items()
            ],
            "fleet": {
                "serving": "pooled",
                "profile": str(profile),
                "kv_bytes": int(MEMORY_BYTES * KV_SHARE),
                "weights_bytes": int(MEMORY_BYTES * (1 - KV_SHARE)),
                "both_slots": 1,
            },
            "policy": {"batch_max": BATCH_MAX},
        }
    )


def slowed_profile(folder: Path, factor: float) -> Path:
    """The GPU profile with steps and transfers that take so many times as long."""
    document = tomlkit.parse(PROFILE.read_text(encoding="utf-8")).unwrap()
    document["pcie_bytes_per_s"] /= factor
    for model in document["models"]:
        model |= {key: value * factor for key, value in model.items() if key.startswith(("prefill_", "decode_"))}
    path = folder / f"slowed-{factor:.6g}.toml"
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    return path


def rows(answers: Sequence[Answer], watch: Watch, same: Simulated, slowed: Simulated) -> list[Row]:
    """Figures side by side."""
    found: list[Row] = []
    took_s = max(answer.request.arrived_s + answer.last_s for answer in answers)
    for tier, slow in zip(same.tiers, slowed.tiers, strict=True):
        ours = [answer for answer in answers if answer.request.tier == tier.tier]
        ttft_s = [answer.first_s for answer in ours]
        tbt_s = [
            (answer.last_s - answer.first_s) / (answer.request.output_tokens - 1)
            for answer in ours
            if answer.request.output_tokens > 1
        ]
        found += _quantiles(f"{tier.tier} TTFT", ttft_s, tier.ttft_s, slow.ttft_s)
        found += _quantiles(f"{tier.tier} TBT", tbt_s, tier.tbt_mean_s, slow.tbt_mean_s)
    figures = [(one.switches, one.busy_s, one.took_s) for one in (same, slowed)]
    measured = (watch.switches, watch.busy_s, took_s)
    for name, live_one, one, other in zip(
        ("switches", "slot busy, s", "all over after, s"), measured, *figures, strict=True
    ):
        found.append(Row(name=name, live=live_one, simulated=one, slowed=other))
    return found


def _quantiles(name: str, values: Sequence[float], simulated: Quantiles | None, slowed: Quantiles | None) -> list[Row]:
    if simulated is None or slowed is None:
        return []
    return [
        Row(name=f"{name} p{share}, s", live=_percentile(values, share), simulated=one, slowed=other)
        for share, one, other in ((50, simulated.p50, slowed.p50), (95, simulated.p95, slowed.p95))
    ]


def _percentile(values: Sequence[float], share: float) -> float:
    """The least value that this share of all does not exceed, as the simulator counts."""
    return float(np.percentile(values, share, method="inverted_cdf"))


def compared(
    folder: Path, traffic: tuple[float, float, int], speed: float, tools: Path | None
) -> tuple[int, list[Row], float]:
    """How many requests were sent, the figures of both, and how much slower than its profile the live node was.

    Args:
        folder: where it runs.
        traffic: seconds, requests a second, and the seed.
        speed: of the live node.
        tools: where AIPerf is installed, which then sends; None: we do.

    Raises:
        ToolError: AIPerf is not installed, or failed.
    """
    seconds, rate_per_s, seed = traffic

    def slower(factor: float) -> Scenario:
        return scenario(seconds, rate_per_s, seed, slowed_profile(folder, factor))

    same = slower(1 / speed)
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    write_word_tokenizer(tokenizer)
    client: Client = send_ourselves
    if tools is not None:
        client = AiperfClient(tools=tools, out=folder / "aiperf", tokenizer=tokenizer, seed=seed)
    answers, watch = asyncio.run(live(folder, list(traffic_of(same, seed)), speed, client, tokenizer))
    sent = [answer.request for answer in answers]
    result = simulated(same, sent)
    factor = watch.busy_s / result.busy_s
    return len(sent), rows(answers, watch, result, simulated(slower(factor / speed), sent)), factor


def main(
    seconds: Annotated[float, typer.Option(min=5, help="For how long requests come.")] = 900.0,
    rate_per_s: Annotated[float, typer.Option(min=0.1, help="Requests a second, of all three models together.")] = 0.25,
    speed: Annotated[
        float, typer.Option(min=0.01, help="1: as fast as an H800; less: this machine matters less.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    client: Annotated[
        Literal["own", "aiperf"], typer.Option(help="Who sends: this program, or AIPerf for each model and tier.")
    ] = "own",
    tools: Annotated[Path, typer.Option(file_okay=False, help="Where AIPerf is installed.")] = TOOLS,
    home: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to run in and to keep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a small scenario live and simulated, and set both side by side.

    \b
    Live times hold what the simulator leaves out: gateway, agent, worker and client on this machine's cores. The
    simulator gets the requests that the client sent, at the times at which it did.

    \b
    Examples:
      python -m ops.bench.papers.live_vs_simulated --seconds 900 --rate-per-s 0.25 --speed 0.5 --json
      python -m ops.bench.papers.live_vs_simulated --client aiperf  (`make bench-independent` installs it)
    """
    traffic = seconds, rate_per_s, seed
    try:
        with work_folder(home) as folder:
            sent, found, factor = compared(folder, traffic, speed, tools.resolve() if client == "aiperf" else None)
    except ToolError as error:
        notes().print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    figures = [
        asdict(row) | {"difference": row.difference, "slowed_difference": row.slowed_difference} for row in found
    ]
    load = os.getloadavg()[0]
    if as_json:
        print_json({"client": client, "requests": sent, "load_average": load, "slowed_by": factor, "figures": figures})
        return
    columns: Columns = {
        "figure": "name",
        "live": lambda row: f"{row['live']:.4g}",
        "simulated": lambda row: f"{row['simulated']:.4g}",
        "difference": lambda row: f"{row['difference']:+.1%}",
        "slowed": lambda row: f"{row['slowed']:.4g}",
        "its difference": lambda row: f"{row['slowed_difference']:+.1%}",
    }
    print_table(f"{sent} requests of {client}; load average {load:.1f}, slowed by {factor:.3f}", columns, figures)


if __name__ == "__main__":
    typer.run(main)
