"""Routing by prefix on a trace with block hashes: `python -m ops.bench.papers.prefix_routing --help`.

The trace is Mooncake's (`synthetic_trace.jsonl`: prompts of 15,300 tokens on average, 65 % of which an earlier prompt
began with), served by dedicated instances of a 7B model. A load is a rate relative to the recorded one: time runs that
many times as fast. The first draw is the whole trace, others keep four of five conversations at random (those with the
same first block), at the same rate. `reuse` is what an infinite cache would save of the prompt tokens; `saved`, what
the instances' caches did.

`--shared RATE` serves another load: for two minutes, RATE prompts a second, of which six in ten begin with the same
16,384 tokens. Whoever follows the cache alone sends all of these to one instance.
"""

import gzip
import json
import random
from collections.abc import Iterable, Iterator
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
SHARED = 0.6
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


def shared_beginning(rate_per_s: float, draw: int, *, duration_s: float = 120.0) -> list[Record]:
    """Prompts of which most share their first 32 blocks, with 300 tokens of their own; the others share nothing."""
    chance, at_s, block = random.Random(draw + 1), 0.0, 1000
    records: list[Record] = []
    while at_s < duration_s:
        at_s += chance.expovariate(rate_per_s)
        blocks = list(range(32)) if chance.random() < SHARED else []
        tokens = BLOCK_TOKENS * len(blocks) + 300 if blocks else chance.randint(500, 6000)
        own = -(-tokens // BLOCK_TOKENS) - len(blocks)
        record = {"timestamp": 1000 * at_s, "input_length": tokens, "output_length": chance.randint(50, 250)}
        records.append(record | {"hash_ids": [*blocks, *range(block, block + own)]})
        block += own
    return records


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


def scenario_of(
    trace: Path, *, instances: int, kv_bytes: int, host_bytes: int, gateways: int, moves: bool = False
) -> Scenario:
    """Instances of a 7B model in one region. `moves`: waiting requests, to idle instances."""
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
            "policy": {"gateways": gateways, "rerouting": moves},
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


def loads_of(
    trace: Path | None, loads: list[float], shared: list[float], draws: int
) -> Iterator[tuple[float, int, list[Record], float]]:
    """The rate, the draw, the records, and how many times as fast as recorded they come."""
    records = [] if trace is None else read_trace(trace)
    for rate in loads if records else ():
        for draw in range(draws):
            kept = drawn(records, draw)
            yield rate, draw, kept, rate * len(records) / len(kept)
    for rate in shared:
        for draw in range(draws):
            yield rate, draw, shared_beginning(rate, draw), 1.0


def main(
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake's trace, JSON lines, compressed by gzip or not.", exists=True)
    ] = None,
    router: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(ROUTERS)}; may be repeated.")] = None,
    load: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Rate relative to the trace's; may be repeated.")
    ] = None,
    shared: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Prompts/s of which most begin alike; may be repeated.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each load.")] = 1,
    instances: Annotated[int, typer.Option(min=1, help="Instances of the model.")] = 8,
    kv_gb: Annotated[float, typer.Option(min=1.0, help="KV memory of an instance, GB.")] = 50.0,
    host_gb: Annotated[float, typer.Option(min=0.0, help="Host memory of an instance for prefixes, GB.")] = 100.0,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways, each with an index of its own.")] = 1,
    moves: Annotated[bool, typer.Option("--moves", help="Waiting requests move to idle instances.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prefill tokens saved and times to the first token, by router and load.

    \b
    Examples:
      python -m ops.bench.papers.prefix_routing mooncake/synthetic_trace.jsonl.gz --load 4 --draws 3
      python -m ops.bench.papers.prefix_routing --shared 30
    """
    if trace is None and not shared:
        raise typer.BadParameter("needs a trace, or --shared", param_hint="TRACE")
    names, loads = chosen(router, ROUTERS, "--router"), load or [1.0, 2.0, 3.0, 4.0, 6.0, 10.0]
    rows: list[dict[str, Any]] = []
    total = (len(loads) * (trace is not None) + len(shared or ())) * draws * len(names)
    with work_folder() as folder, progress_bar("runs") as report:
        path = folder / "trace.jsonl"
        for rate, draw, records, faster in loads_of(trace, loads, shared or [], draws):
            write_trace(records, faster=faster, path=path)
            scenario = scenario_of(
                path,
                instances=instances,
                kv_bytes=int(kv_gb * 1e9),
                host_bytes=int(host_gb * 1e9),
                gateways=gateways,
                moves=moves,
            )
            for name in names:
                rows.append(asdict(measure(scenario, name, load=rate, draw=draw, reuse=reuse_of(records))))
                report(f"{name} at {rate:g}", len(rows), total)
    if as_json:
        print_json(rows)
    else:
        print_table("Routing by prefix", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
