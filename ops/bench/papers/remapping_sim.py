"""Remapping against KV swapping and recomputing, simulated: the paper's comparisons, with its figures and ours.

The worker is the replay engine in simulated time (`ops.bench.papers.remapping_engine`): the code of the live node
decides on time slices, victims, layers and the cheapest action. The paper's text gives the rates of OPT-13b only, 1 and
10 a second; the rates here are those at which the first of the rivals runs out of memory, and twice that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from dataplane.engines.core.remapping.settings import RemapSettings
from ops.bench.papers.remapping_engine import SharedFigures, SharedSettings, Sharing, Way, measure
from ops.bench.papers.remapping_load import (
    COMBINATIONS,
    GRACE_HOPPER,
    WIRES,
    Lengths,
    Recordings,
    SharedLoad,
    Wire,
    draw_asks,
)
from ops.bench.shared import chosen
from ops.client.screen import AsJson, Columns, notes, print_json, print_table

VLLM, PIE, ONEIROS, TIDEPOOL = "vLLM", "Pie", "Oneiros", "Tidepool"
VLLM_BY_STEP = "vLLM, step by step"
SWEEP_BYTES_PER_S = (10e9, 25e9, 55.6e9, 100e9, 200e9, 427e9, 900e9)
BOTH_WAYS = 1.8
"""The sum of both directions over one direction: an assumption."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `rival`: who serves. `off_peak_rate`: the rate of as many further requests, which alone are counted."""

    group: str
    combination: str
    load: SharedLoad
    rival: str
    settings: SharedSettings
    off_peak_rate: float | None = None

    @property
    def title(self) -> str:
        rates = self.load.rates
        rate = f"{sum(rates):g}" if len(set(rates)) == 1 else "+".join(f"{rate:g}" for rate in rates)
        return f"{self.combination} {'/'.join(dict.fromkeys(self.load.lengths))} {rate}/s"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The size of each run: its requests, and the seed of their lengths."""

    requests: int = 200
    seed: int = 0

    def load(self, combination: str, rates: Sequence[float], lengths: Sequence[Lengths]) -> SharedLoad:
        """A load of a combination of models. A single rate is the sum of all; single lengths are for all."""
        models = len(COMBINATIONS[combination])
        return SharedLoad(
            rates=rates if len(rates) == models else [rates[0] / models] * models,
            lengths=lengths if len(lengths) == models else [lengths[0]] * models,
            requests=self.requests,
            seed=self.seed,
        )


def rivals(wire: Wire, sharing: Sharing) -> dict[str, SharedSettings]:
    """Who serves: the three of the paper, and this project's, which always has one KV memory for all models. With mixed
    steps all take turns step by step but vLLM, whose turns stay as they are.
    """

    def settings(way: Way, *, shared: bool) -> SharedSettings:
        return SharedSettings(way=way, wire=wire, sharing=sharing, shared_kv=shared)

    return {
        VLLM: replace(settings("recompute", shared=False), step_by_step=False),
        PIE: settings("pie", shared=False),
        ONEIROS: settings("remap", shared=True),
        "recompute, one KV": settings("recompute", shared=True),
        "swap, one KV": settings("swap", shared=True),
        "pie, one KV": settings("pie", shared=True),
        TIDEPOOL: settings("auto", shared=True),
    }


def against_rivals(
    group: str, combination: str, load: SharedLoad, *, sharing: Sharing = "temporal", wire: Wire = GRACE_HOPPER
) -> Iterator[Case]:
    """All rivals, with one load."""
    for rival, settings in rivals(wire, sharing).items():
        yield Case(group=group, combination=combination, load=load, rival=rival, settings=settings)


def with_settings(
    group: str,
    combination: str,
    load: SharedLoad,
    choices: Mapping[str, RemapSettings],
    off_peak_rate: float | None = None,
) -> Iterator[Case]:
    """vLLM, and Oneiros with different settings."""
    plain = rivals(GRACE_HOPPER, "temporal")
    changed = {name: replace(plain[ONEIROS], remap=remap) for name, remap in choices.items()}
    for rival, settings in {VLLM: plain[VLLM], **changed}.items():
        yield Case(
            group=group,
            combination=combination,
            load=load,
            rival=rival,
            settings=settings,
            off_peak_rate=off_peak_rate,
        )


def temporal(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 8. Alpaca's short requests never fill the KV of C1, whatever their rate."""
    for rate in (3.0, 6.0):
        yield from against_rivals("temporal", "C1", asked.load("C1", [rate], ["sharegpt"]))
    for rate in (8.0, 16.0):
        yield from against_rivals("temporal", "C2", asked.load("C2", [rate], ["alpaca"]))
    for rate in (1.0, 2.0):
        yield from against_rivals("temporal", "C2", asked.load("C2", [rate], ["sharegpt"]))


def uneven(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 9: different rates."""
    for rates in ((0.5, 1.5), (1.5, 0.5)):
        yield from against_rivals("uneven", "C2", asked.load("C2", rates, ["sharegpt"]))


def inputs(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 10: long requests for one model, short ones for the other."""
    both: tuple[tuple[Lengths, Lengths], ...] = (("long", "short"), ("short", "long"))
    for lengths in both:
        yield from against_rivals("inputs", "C2", asked.load("C2", [1.0], lengths))


def spatial(asked: Asked) -> Iterator[Case]:
    """Section 7.3, figure 12."""
    for rate in (2.0, 4.0):
        yield from against_rivals("spatial", "C1", asked.load("C1", [rate], ["sharegpt"]), sharing="spatial")


def single(asked: Asked) -> Iterator[Case]:
    """Section 7.4, figure 14: one model, against Pie; and 7.3's strict isolation, which is one model, too."""
    for rate in (10.0, 60.0):
        yield from against_rivals("single", "OPT-13b", asked.load("OPT-13b", [rate], ["alpaca"]))
    yield from against_rivals("single", "OPT-13b", asked.load("OPT-13b", [2.0], ["sharegpt"]))


def victims(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 11: whose layers are offloaded first. Without caps a model with many waits."""
    choices = {
        "mru": RemapSettings(victims="mru"),
        "lru": RemapSettings(victims="lru"),
        "mru, not capped": RemapSettings(victims="mru", capped=False),
        "lru, not capped": RemapSettings(victims="lru", capped=False),
    }
    for rate in (1.5, 3.0):
        yield from with_settings("victims", "C1", asked.load("C1", [rate], ["sharegpt"]), choices)


def frames(asked: Asked) -> Iterator[Case]:
    """Section 7.5, figure 15: m. Capped by its own inequality, or (alpha up to 10) the same alpha for each m."""
    ten = RemapSettings(capped=False, share_max=0.25)
    choices = {
        "m = alpha + 1": RemapSettings(frames_max=1),
        "m = alpha + 2": RemapSettings(frames_min=2, frames_max=2),
        "least m": RemapSettings(),
        "m = alpha + 1, alpha to 10": replace(ten, frames_max=1),
        "m = alpha + 2, alpha to 10": replace(ten, frames_min=2, frames_max=2),
        "least m, alpha to 10": ten,
    }
    for rate in (2.0, 4.0):
        yield from with_settings("frames", "OPT-13b", asked.load("OPT-13b", [rate], ["sharegpt"]), choices)


def reversion(asked: Asked) -> Iterator[Case]:
    """Section 7.6.1, figure 16: a peak, then one request a second (Alpaca) or one in ten (ShareGPT)."""
    half = RemapSettings(capped=False, share_max=0.5)
    choices = {
        "reverts": RemapSettings(),
        "never reverts": RemapSettings(reverts=False),
        "reverts, alpha to 20": half,
        "never reverts, alpha to 20": replace(half, reverts=False),
    }
    alpaca, sharegpt = asked.load("OPT-13b", [60.0], ["alpaca"]), asked.load("OPT-13b", [4.0], ["sharegpt"])
    yield from with_settings("reversion", "OPT-13b", alpaca, choices, off_peak_rate=1.0)
    yield from with_settings("reversion", "OPT-13b", sharegpt, choices, off_peak_rate=0.1)


def caps(asked: Asked) -> Iterator[Case]:
    """Section 7.6.2, figure 17: whether layers whose loads are not hidden are offloaded, too."""
    choices = {"capped": RemapSettings(), "not capped": RemapSettings(capped=False)}
    for rate in (1.0, 2.0):
        yield from with_settings("caps", "OPT-13b", asked.load("OPT-13b", [rate], ["sharegpt"]), choices)


def wires(asked: Asked) -> Iterator[Case]:
    """The paper's interconnect, PCIe 5 and PCIe 4."""
    for wire in WIRES:
        yield from against_rivals("wires", "C1", asked.load("C1", [6.0], ["sharegpt"]), wire=wire)
        yield from against_rivals("wires", "OPT-13b", asked.load("OPT-13b", [2.0], ["sharegpt"]), wire=wire)


def crossover(asked: Asked) -> Iterator[Case]:
    """One model on interconnects from slow to fast."""
    for bytes_per_s in SWEEP_BYTES_PER_S:
        both_bytes_per_s = BOTH_WAYS * bytes_per_s
        wire = Wire(name=f"{bytes_per_s / 1e9:g} GB/s", bytes_per_s=bytes_per_s, both_bytes_per_s=both_bytes_per_s)
        yield from against_rivals("crossover", "OPT-13b", asked.load("OPT-13b", [2.0], ["sharegpt"]), wire=wire)


GROUPS = {
    each.__name__: each
    for each in (temporal, uneven, inputs, spatial, single, victims, frames, reversion, caps, wires, crossover)
}


WORKLOADS = "aegaeon/workloads.csv.gz"
ARRIVALS = "azure/AzureLLMInferenceTrace_code_2023.csv.gz"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of the paper: by how many percent `rival` is lower (latency) or higher (throughput) than `than`."""

    group: str
    rival: str
    than: str
    figure: str
    percent: float
    where: str


def _against(than: str, group: str, where: str, *, tokens: float, tbt: float, ttft: float) -> list[Published]:
    """Oneiros against another: throughput, P99 TBT and P99 TTFT. The paper does not define its P99 TBT."""
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
    rival: Annotated[list[str] | None, typer.Option(help="Run these only, by their names in the tables.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each run.")] = 200,
    seed: Annotated[int, typer.Option()] = 0,
    chunk_tokens: Annotated[
        int, typer.Option(min=256, help="Tokens that a step prefills at most: longer prompts go in chunks.")
    ] = 2048,
    mixed: Annotated[
        bool,
        typer.Option("--mixed", help="Prefill beside the batch that decodes, as far as objectives allow: all rivals."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare actions when KV memory runs out.

    \b
    Examples:
      python -m ops.bench.papers.remapping_sim --data ../data
      python -m ops.bench.papers.remapping_sim --data ../data --group wires --group crossover --json
      python -m ops.bench.papers.remapping_sim --data ../data --group temporal --chunk-tokens 512 --mixed
      python -m ops.bench.papers.remapping_sim --data ../data --group uneven --rival vLLM --rival Tidepool
    """
    names = chosen(group, GROUPS, "--group")
    chosen(rival, {case.rival: case for name in names for case in GROUPS[name](Asked())}, "--rival")
    recordings = Recordings(azure=data / ARRIVALS, aegaeon=data / WORKLOADS)
    asked = Asked(requests=requests, seed=seed)
    rows = []
    for name in names:
        notes().print(name)
        cases = [case for case in GROUPS[name](asked) if not rival or case.rival in rival]
        rows += [row_of(case, run_case(case, recordings, chunk_tokens, mixed=mixed)) for case in cases]
    published = [row for name in names for row in against_published(name, rows)]
    if as_json:
        print_json({"runs": rows, "by_load": by_load(rows), "published": published})
        return
    for name in names:
        print_table(name, RUN_COLUMNS, [row for row in rows if row["group"] == name])
    print_table("Against vLLM, by load", BY_LOAD_COLUMNS, by_load(rows))
    print_table("Against the paper, mean over the loads that ran out of memory", PUBLISHED_COLUMNS, published)


def run_case(case: Case, recordings: Recordings, chunk_tokens: int = 2048, *, mixed: bool = False) -> SharedFigures:
    """One run."""
    models = COMBINATIONS[case.combination]
    asks = draw_asks(models, case.load, recordings)
    skip = 0
    if case.off_peak_rate is not None:
        skip = len(asks)
        asks += draw_asks(models, case.load.follow_up(case.off_peak_rate), recordings, after=asks[-1])
    settings = replace(case.settings, prefill_tokens_max=chunk_tokens, mixed=mixed)
    return measure(models, asks, settings, skip=skip)


def against_published(group: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paper's figures of a group with ours: the change in percent, mean over its loads that ran out of memory."""
    own_rows = [row for row in rows if row["group"] == group]
    lacking = dict.fromkeys(row["load"] for row in own_rows if row["counts"]["recomputed"] or row["counts"]["deepened"])
    found = []
    for each in (published for published in PUBLISHED if published.group == group):
        own, other = (
            {row["load"]: row[each.figure] for row in own_rows if row["rival"] == name}
            for name in (each.rival, each.than)
        )
        percents = [100 * (own[load] / other[load] - 1) for load in lacking if load in own and load in other]
        if percents:
            found.append(
                asdict(each) | {"ours_percent": fmean(percents), "least": min(percents), "most": max(percents)}
            )
    return found


AGAINST_VLLM = ("tokens_per_s", "tbt_p99_s", "tpot_p99_s", "normalized_p99_s")


def by_load(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each load, by how many percent remapping is above or below vLLM: alone, and as this project uses it; and vLLM
    step by step, where it was run. First tokens and batches tell where one of them starves: a rival whose requests wait
    for memory decodes few at a time.
    """
    found = []
    for vllm in (row for row in rows if row["rival"] == VLLM):
        same = [row for row in rows if all(row[key] == vllm[key] for key in ("group", "load", "wire"))]
        for row in (row for row in same if row["rival"] in (ONEIROS, TIDEPOOL, VLLM_BY_STEP)):
            named = {key: row[key] for key in ("group", "load", "wire", "rival")}
            percents = {key: 100 * (row[key] / vllm[key] - 1) for key in AGAINST_VLLM}
            waits = {key: (vllm[key], row[key]) for key in ("ttft_p99_s", "batch_mean")}
            found.append(named | percents | waits)
    return found


def row_of(case: Case, figures: SharedFigures) -> dict[str, Any]:
    """The figures of a run, with whose they are."""
    named = {"group": case.group, "load": case.title, "wire": case.settings.wire.name, "rival": case.rival}
    return named | asdict(figures)


RUN_COLUMNS: Columns = {
    "load": "load",
    "wire": "wire",
    "rival": "rival",
    "tok/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "TBT p50/p99 ms": lambda row: f"{1000 * row['tbt_p50_s']:.1f} / {1000 * row['tbt_p99_s']:.0f}",
    "step p99 ms": lambda row: f"{1000 * row['step_p99_s']:.0f}",
    "TPOT p50/p99 ms": lambda row: f"{1000 * row['tpot_p50_s']:.1f} / {1000 * row['tpot_p99_s']:.0f}",
    "normalized p50/p99 ms": lambda row: f"{1000 * row['normalized_p50_s']:.0f} / {1000 * row['normalized_p99_s']:.0f}",
    "TTFT p50/p99 s": lambda row: f"{row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.1f}",
    "batch": lambda row: f"{row['batch_mean']:.1f} / {row['batch_peak']}",
    "given GB": lambda row: f"{row['counts']['given_bytes_max'] / 1e9:.1f}",
    "dropped/out": lambda row: f"{row['counts']['recomputed']}/{row['counts']['swapped']}",
}
BY_LOAD_COLUMNS: Columns = {
    "group": "group",
    "load": "load",
    "wire": "wire",
    "rival": "rival",
    "tok/s": lambda row: f"{row['tokens_per_s']:+.0f} %",
    "TBT p99": lambda row: f"{row['tbt_p99_s']:+.0f} %",
    "TPOT p99": lambda row: f"{row['tpot_p99_s']:+.0f} %",
    "normalized p99": lambda row: f"{row['normalized_p99_s']:+.0f} %",
    "TTFT p99 s, vLLM's and its": lambda row: " -> ".join(f"{each:.1f}" for each in row["ttft_p99_s"]),
    "batch": lambda row: " -> ".join(f"{each:.1f}" for each in row["batch_mean"]),
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
