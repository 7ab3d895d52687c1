"""The same small scenario, run live and simulated: how far the simulator is from what it stands for.

Live: a whole stack of real processes on this machine, with one node on the replay engine whose one slot has memory for
two of three models. Simulated: a pool of that slot. Both get the same requests at the same times.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import tomlkit
import typer

from ops.bench.papers.live_vs_simulated_load import (
    BATCH_MAX,
    KV_SHARE,
    MEMORY_BYTES,
    MODELS,
    PROFILE,
    REGION,
    SERVICE_TIERS,
    Answer,
    Watch,
    live,
)
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.simulator.results.results import Quantiles, Result
from ops.simulator.run import simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.scenario import Scenario


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
        """Of the simulated one to the live one, as a share of the latter."""
        return self.simulated / self.live - 1 if self.live else 0.0

    @property
    def slowed_difference(self) -> float:
        """The same of the slowed one."""
        return self.slowed / self.live - 1 if self.live else 0.0


def scenario(seconds: float, rate_per_s: float, seed: int, profile: Path) -> Scenario:
    """The scenario of both."""
    lengths = {"spread": 0.6, "most": 2000}
    return Scenario.model_validate(
        {
            "name": "three models on a slot for two",
            "seed": seed,
            "regions": [REGION],
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


def rows(answers: Sequence[Answer], took_s: float, watch: Watch, result: Result, slowed: Result) -> list[Row]:
    """Figures side by side."""
    found: list[Row] = []
    for tier, slow in zip(result.tiers, slowed.tiers, strict=True):
        ours = [answer for answer in answers if answer.request.tier == tier.tier]
        ttft_s = [answer.first_s for answer in ours]
        tbt_s = [
            (answer.last_s - answer.first_s) / (answer.request.output_tokens - 1)
            for answer in ours
            if answer.request.output_tokens > 1
        ]
        found += _quantiles(f"{tier.tier} TTFT", ttft_s, tier.ttft_s, slow.ttft_s)
        found += _quantiles(f"{tier.tier} TBT", tbt_s, tier.tbt_mean_s, slow.tbt_mean_s)
    simulated = [(one.totals.switches, one.busy_share * one.simulated_s, one.simulated_s) for one in (result, slowed)]
    measured = (watch.switches, watch.busy_s, took_s)
    for name, live_one, one, other in zip(
        ("switches", "slot busy, s", "all over after, s"), measured, *simulated, strict=True
    ):
        found.append(Row(name=name, live=live_one, simulated=one, slowed=other))
    return found


def _quantiles(name: str, values: Sequence[float], simulated: Quantiles | None, slowed: Quantiles | None) -> list[Row]:
    if simulated is None or slowed is None:
        return []
    return [
        Row(name=f"{name} p{share}, s", live=float(np.percentile(values, share)), simulated=one, slowed=other)
        for share, one, other in ((50, simulated.p50, slowed.p50), (95, simulated.p95, slowed.p95))
    ]


def main(
    seconds: Annotated[float, typer.Option(min=5, help="For how long requests come.")] = 220.0,
    rate_per_s: Annotated[float, typer.Option(min=0.1, help="Requests a second, of all three models together.")] = 0.25,
    speed: Annotated[
        float, typer.Option(min=0.01, help="1: as fast as an H800; less: this machine matters less.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    home: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to run in and to keep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a small scenario live and simulated, and set both side by side.

    \b
    Live times hold what the simulator leaves out: gateway, agent, worker and client on this machine's cores.

    \b
    Example:
      python -m ops.bench.papers.live_vs_simulated --seconds 220 --rate-per-s 0.25 --speed 0.5 --json
    """
    with nullcontext(home) if home else TemporaryDirectory(prefix="tidepool-bench-") as name:
        folder = Path(name).resolve()

        def slower(factor: float) -> Scenario:
            return scenario(seconds, rate_per_s, seed, slowed_profile(folder, factor))

        same = slower(1 / speed)
        requests = list(traffic_of(same, seed))
        answers, took_s, watch = asyncio.run(live(folder, requests, speed))
        result = simulate(same).result
        factor = watch.busy_s / (result.busy_share * result.simulated_s)
        slowed = simulate(slower(factor / speed)).result
    figures = [
        asdict(row) | {"difference": row.difference, "slowed_difference": row.slowed_difference}
        for row in rows(answers, took_s, watch, result, slowed)
    ]
    load = os.getloadavg()[0]
    if as_json:
        print_json({"requests": len(requests), "load_average": load, "slowed_by": factor, "figures": figures})
        return
    columns: Columns = {
        "figure": "name",
        "live": lambda row: f"{row['live']:.4g}",
        "simulated": lambda row: f"{row['simulated']:.4g}",
        "difference": lambda row: f"{row['difference']:+.1%}",
        "slowed": lambda row: f"{row['slowed']:.4g}",
        "its difference": lambda row: f"{row['slowed_difference']:+.1%}",
    }
    print_table(f"{len(requests)} requests; load average {load:.1f}, slowed by {factor:.3f}", columns, figures)


if __name__ == "__main__":
    typer.run(main)
