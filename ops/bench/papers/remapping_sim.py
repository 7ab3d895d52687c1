"""Remapping against KV swapping and recomputing, simulated: the paper's comparisons, its figures beside ours.

The slot is the replay engine's in simulated time (`ops.bench.papers.remapping_engine`): turns, who gives up which
layers, and which way out is cheapest are decided by the code of the live node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from ops.bench.papers.remapping_cases import GROUPS, ONEIROS, PIE, VLLM, Asked, Case
from ops.bench.papers.remapping_engine import SharedFigures, measure
from ops.bench.papers.remapping_load import COMBINATIONS, Recordings, draw_asks
from ops.client.screen import AsJson, Columns, notes, print_json, print_table

WORKLOADS = "aegaeon/workloads.csv.gz"
ARRIVALS = "azure/AzureLLMInferenceTrace_code_2023.csv.gz"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of the paper: how much lower (latency) or higher (throughput) `rival` is than `than`, in percent."""

    group: str
    rival: str
    than: str
    figure: str
    percent: float
    where: str


def _against(than: str, group: str, where: str, *, tokens: float, tbt: float, ttft: float) -> list[Published]:
    """Oneiros against another: throughput, P99 TBT and P99 TTFT. What P99 TBT is taken over the paper does not say."""
    percents = {"tokens_per_s": tokens, "tbt_p99_s": tbt, "tpot_p99_s": tbt, "ttft_p99_s": ttft}
    return [
        Published(group=group, rival=ONEIROS, than=than, figure=figure, percent=percent, where=where)
        for figure, percent in percents.items()
    ]


def _settings(group: str, rival: str, than: str, where: str, **percents: float) -> list[Published]:
    """One choice of settings against another."""
    return [
        Published(group=group, rival=rival, than=than, figure=figure, percent=percent, where=where)
        for figure, percent in percents.items()
    ]


PUBLISHED = (
    *_against(VLLM, "temporal", "7.2, C1 and C2", tokens=42.6, tbt=-49.6, ttft=-85.8),
    *_against(VLLM, "uneven", "7.2, rates", tokens=86.7, tbt=-82.5, ttft=-99.3),
    *_against(VLLM, "inputs", "7.2, lengths", tokens=65.6, tbt=-57.1, ttft=-98.1),
    *_against(VLLM, "spatial", "7.3, not strict", tokens=6.6, tbt=-65.5, ttft=-20.7),
    *_against(VLLM, "single", "7.3, strict", tokens=7.9, tbt=-57.4, ttft=-34.8),
    *_against(PIE, "single", "7.4", tokens=47.1, tbt=-35.0, ttft=-93.6),
    *_settings("victims", "mru", "lru", "7.2, up to", tpot_p99_s=-22.0),
    *_settings("victims", "mru, not capped", "lru, not capped", "7.2, up to", tpot_p99_s=-22.0),
    *_settings("frames", "m = alpha + 1", "least m", "7.5, up to", tokens_per_s=-12.7),
    *_settings("frames", "m = alpha + 1, alpha to 10", "least m, alpha to 10", "7.5, up to", tokens_per_s=-12.7),
    *_settings("reversion", "reverts", "never reverts", "7.6.1", tpot_p50_s=-49.0),
    *_settings("reversion", "reverts, alpha to 20", "never reverts, alpha to 20", "7.6.1", tpot_p50_s=-49.0),
    *_settings("caps", "capped", "not capped", "7.6.2, 10 /s", tpot_p99_s=-58.0, tpot_p50_s=-44.0),
)


def main(
    data: Annotated[Path, typer.Option(help=f"The folder with {ARRIVALS} and {WORKLOADS}.", file_okay=False)],
    group: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(GROUPS)}; all if not given.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each run.")] = 200,
    seed: Annotated[int, typer.Option()] = 0,
    chunk_tokens: Annotated[
        int, typer.Option(min=256, help="Tokens that a step prefills at most: longer prompts go in chunks.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Compare ways out of a lack of KV memory.

    \b
    Examples:
      python -m ops.bench.papers.remapping_sim --data ../data
      python -m ops.bench.papers.remapping_sim --data ../data --group wires --group crossover --json
      python -m ops.bench.papers.remapping_sim --data ../data --group temporal --chunk-tokens 512
    """
    names = group or list(GROUPS)
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(GROUPS)}", param_hint="--group")
    recordings = Recordings(azure=data / ARRIVALS, aegaeon=data / WORKLOADS)
    asked = Asked(requests=requests, seed=seed)
    rows = []
    for name in names:
        notes().print(name)
        rows += [_row(case, run_case(case, recordings, chunk_tokens)) for case in GROUPS[name](asked)]
    published = [row for name in names for row in beside_published(name, rows)]
    if as_json:
        print_json({"runs": rows, "published": published})
        return
    for name in names:
        print_table(name, RUN_COLUMNS, [row for row in rows if row["group"] == name])
    print_table("Beside the paper, mean over the loads that lacked memory", PUBLISHED_COLUMNS, published)


def run_case(case: Case, recordings: Recordings, chunk_tokens: int = 2048) -> SharedFigures:
    """One run."""
    models = COMBINATIONS[case.combination]
    asks = draw_asks(models, case.load, recordings)
    skip = 0
    if case.off_peak_rate is not None:
        skip = len(asks)
        asks += draw_asks(models, case.load.follow_up(case.off_peak_rate), recordings, after=asks[-1])
    return measure(models, asks, replace(case.settings, prefill_tokens_max=chunk_tokens), skip=skip)


def beside_published(group: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paper's figures of a group with ours: the change in percent, mean over its loads that lacked memory."""
    own_rows = [row for row in rows if row["group"] == group]
    lacking = dict.fromkeys(row["load"] for row in own_rows if row["counts"]["recomputed"] or row["counts"]["deepened"])
    found = []
    for each in (published for published in PUBLISHED if published.group == group):
        own, other = (
            {row["load"]: row[each.figure] for row in own_rows if row["rival"] == name}
            for name in (each.rival, each.than)
        )
        percents = [100 * (own[load] / other[load] - 1) for load in lacking]
        if percents:
            found.append(
                asdict(each) | {"ours_percent": fmean(percents), "least": min(percents), "most": max(percents)}
            )
    return found


def _row(case: Case, figures: SharedFigures) -> dict[str, Any]:
    place = {"group": case.group, "load": case.title, "wire": case.settings.wire.name, "rival": case.rival}
    return place | asdict(figures)


RUN_COLUMNS: Columns = {
    "load": "load",
    "wire": "wire",
    "rival": "rival",
    "tok/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "TBT p50/p99 ms": lambda row: f"{1000 * row['tbt_p50_s']:.1f} / {1000 * row['tbt_p99_s']:.0f}",
    "step p99 ms": lambda row: f"{1000 * row['step_p99_s']:.0f}",
    "TPOT p50/p99 ms": lambda row: f"{1000 * row['tpot_p50_s']:.1f} / {1000 * row['tpot_p99_s']:.0f}",
    "TTFT p50/p99 s": lambda row: f"{row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.1f}",
    "batch": lambda row: f"{row['batch_mean']:.1f} / {row['batch_peak']}",
    "given GB": lambda row: f"{row['counts']['given_bytes_max'] / 1e9:.1f}",
    "dropped/out": lambda row: f"{row['counts']['recomputed']}/{row['counts']['swapped']}",
}
PUBLISHED_COLUMNS: Columns = {
    "group": "group",
    "figure": lambda row: f"{row['figure']}: {row['rival']} against {row['than']}",
    "paper": lambda row: f"{row['percent']:+.1f} %",
    "section": "where",
    "ours": lambda row: f"{row['ours_percent']:+.1f} %",
    "from .. to": lambda row: f"{row['least']:+.0f} .. {row['most']:+.0f} %",
}

if __name__ == "__main__":
    typer.run(main)
