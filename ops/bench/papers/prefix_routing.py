"""Routing by prefix on a trace with block hashes: `python -m ops.bench.papers.prefix_routing --help`.

The trace is Mooncake's (`synthetic_trace.jsonl`: prompts of 15,300 tokens on average, 65 % of which an earlier prompt
began with), served by dedicated instances of a 7B model. A load is a rate relative to the recorded one: time runs that
many times as fast. The first draw is the whole trace, others keep four of five conversations at random (those with the
same first block), at the same rate. `reuse` is what an infinite cache would save of the prompt tokens; `saved`, what
the instances' caches did.
"""

import gzip
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.protocol.tiers import Tier
from ops.bench.papers.prefix_routers import ROUTERS
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table, progress_bar
from ops.simulator.kernel.requests import BLOCK_TOKENS
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import PROFILES, Scenario

Record = dict[str, Any]
KEPT = 0.8
COLUMNS: Columns = {
    "load": lambda row: f"{row['load']:g}",
    "draw": "draw",
    "router": "router",
    "saved": lambda row: f"{row['saved']:.1%}",
    "of reuse": lambda row: f"{row['saved'] / row['reuse']:.2f}",
    "TTFT p50": lambda row: f"{row['ttft_p50_s']:.3f} s",
    "TTFT p95": lambda row: f"{row['ttft_p95_s']:.3f} s",
    "failed": "failed",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. `reuse` and `saved`: shares of all prompt tokens."""

    load: float
    draw: int
    router: str
    reuse: float
    saved: float
    ttft_p50_s: float
    ttft_p95_s: float
    token_gap_p50_s: float
    failed: int


def read_trace(path: Path) -> list[Record]:
    """The trace's lines, in order of time; gzip or plain."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def drawn(records: list[Record], draw: int) -> list[Record]:
    """The records of a draw."""
    if draw == 0:
        return records
    chance = random.Random(draw)
    keeps: dict[int, bool] = {}
    for record in records:
        keeps.setdefault(record["hash_ids"][0], chance.random() < KEPT)
    return [record for record in records if keeps[record["hash_ids"][0]]]


def reuse_of(records: Iterable[Record]) -> float:
    """The share of prompt tokens in full blocks that an earlier prompt had, after the same blocks."""
    seen: set[int] = set()
    reused = tokens = 0
    for record in records:
        blocks = record["hash_ids"][: (record["input_length"] - 1) // BLOCK_TOKENS]
        known = next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))
        reused += known * BLOCK_TOKENS
        tokens += record["input_length"]
        seen.update(record["hash_ids"][: record["input_length"] // BLOCK_TOKENS])
    return reused / tokens


def write_trace(records: list[Record], *, faster: float, path: Path) -> None:
    """The records, each `faster` times as soon."""
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record | {"timestamp": record["timestamp"] / faster}) + "\n")


def scenario_of(trace: Path, *, instances: int, kv_bytes: int, host_bytes: int, gateways: int) -> Scenario:
    """Instances of a 7B model in one region."""
    return Scenario.model_validate(
        {
            "name": "routing by prefix",
            "regions": ["one"],
            "traffic": {"kind": "mooncake", "path": str(trace), "tiers": {"IW-N": 1}},
            "models": [{"name": "7b", "weights_bytes": 15_231_233_024, "kv_bytes_per_token": 57_344}],
            "fleet": {
                "serving": "dedicated",
                "profile": str(PROFILES / "h800.toml"),
                "kv_bytes": kv_bytes,
                "prefix_host_bytes": host_bytes,
                "instances": [{"model": "7b", "region": "one", "count": instances}],
            },
            "policy": {"gateways": gateways},
        }
    )


def measure(scenario: Scenario, router: str, *, load: float, draw: int, reuse: float) -> Row:
    """Serve the trace once."""
    world = simulate(scenario, router=ROUTERS[router]()).world
    tally = world.tallies["7b", Tier.IW_N]
    return Row(
        load=load,
        draw=draw,
        router=router,
        reuse=reuse,
        saved=world.cached_tokens / max(world.prompt_tokens, 1),
        ttft_p50_s=tally.ttft.quantile(0.5),
        ttft_p95_s=tally.ttft.quantile(0.95),
        token_gap_p50_s=tally.token_gap.quantile(0.5),
        failed=tally.failed,
    )


def main(
    trace: Annotated[
        Path, typer.Argument(help="Mooncake's trace, JSON lines, compressed by gzip or not.", exists=True)
    ],
    router: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(ROUTERS)}; may be repeated.")] = None,
    load: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Rate relative to the trace's; may be repeated.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each load.")] = 1,
    instances: Annotated[int, typer.Option(min=1, help="Instances of the model.")] = 8,
    kv_gb: Annotated[float, typer.Option(min=1.0, help="KV memory of an instance, GB.")] = 50.0,
    host_gb: Annotated[float, typer.Option(min=0.0, help="Host memory of an instance for prefixes, GB.")] = 100.0,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways, each with an index of its own.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Prefill tokens saved and times to the first token, by router and load.

    \b
    Example:
      python -m ops.bench.papers.prefix_routing mooncake/synthetic_trace.jsonl.gz --load 4 --draws 3
    """
    names, loads = chosen(router, ROUTERS, "--router"), load or [1.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    records = read_trace(trace)
    rows: list[dict[str, Any]] = []
    with work_folder() as folder, progress_bar("runs") as report:
        total = len(loads) * draws * len(names)
        for rate in loads:
            for draw in range(draws):
                kept = drawn(records, draw)
                path = folder / "trace.jsonl"
                write_trace(kept, faster=rate * len(records) / len(kept), path=path)
                scenario = scenario_of(
                    path,
                    instances=instances,
                    kv_bytes=int(kv_gb * 1e9),
                    host_bytes=int(host_gb * 1e9),
                    gateways=gateways,
                )
                for name in names:
                    rows.append(asdict(measure(scenario, name, load=rate, draw=draw, reuse=reuse_of(kept))))
                    report(f"{name} at {rate:g}", len(rows), total)
    if as_json:
        print_json(rows)
    else:
        print_table("Routing by prefix", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
