"""Aegaeon's Figures 11 and 13 in the simulator: `python -m ops.bench.papers.aegaeon --help`.

On the workloads of its artifact: ShareGPT lengths, Poisson arrivals, 120 s at rate 0.1 (40 models: 60 s). Published for
90 % service attainment at that rate: 70 models (paper, H800), 72 (the artifact's simulator, H100), 44 for request-level
switching (ServerlessLLM), 32 for static multiplexing (MuxServe). Six GPUs prefill and ten decode by default.

The testbed: 16 GPUs, models of 7B to 13B. Token k is due 10 s + k * 0.1 s after its request arrived. Step times: the
artifact's H100 profiles, where a switch takes bytes / 16 GB/s, as its simulator assumes; or any other profile.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import typer

from ops.bench.papers.workloads import HALF_AS_LONG, Redraws, Workload, merged, workloads_of
from ops.bench.shared import check_plot, chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import FleetPart, ModelPart, PolicyPart, Scenario, TargetPart
from ops.simulator.traffic.traffic_parts import AegaeonPart

REGION = "one"
ARTIFACT_PROFILE = Path(__file__).parents[2] / "profiles" / "h100-artifact.toml"
GPUS = 16
MODELS = (
    [ModelPart(name=f"7B-{n}", weights_bytes=15_231_233_024, kv_bytes_per_token=57_344) for n in range(6)]
    + [ModelPart(name=f"9B-{n}", weights_bytes=17_658_814_464, kv_bytes_per_token=98_304) for n in range(2)]
    + [ModelPart(name=f"13B-{n}", weights_bytes=26_031_728_640, kv_bytes_per_token=819_200) for n in range(2)]
)
"""Model i of a workload is the one at index i modulo 10: Qwen2.5-7B, Yi-1.5-9B, Llama-2-13B, two bytes a parameter."""
LARGEST_BYTES = MODELS[-1].weights_bytes
TWO_MODELS_BYTES = 53 * 10**9
"""Two of the largest, so that one can be loaded while the other runs."""
DURATION_S = 120.0
"""Of a workload at rate 0.1; those of 40 models last half as long."""
GPU_BYTES = 76 * 10**9
"""Of 80 GiB; the rest is the engine's."""

System = Literal[
    "pooled",
    "pooled-both",
    "request-level",
    "request-level-prefetch",
    "request-level-sjf",
    "request-level-per-gpu",
    "request-level-split",
    "static",
    "dedicated",
]

Metric = Literal["service", "token"]
"""`service`: the mean over requests of the share of their time without an overdue token, as the artifact counts it.
`token`: the share of all tokens that were made in time (section 2.1 of the paper).
"""
METRICS: tuple[Metric, ...] = ("service", "token")


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """How a system uses the GPUs. `weights_bytes`: memory of a GPU for weights, the rest is for KV. `fleet`: keys of
    the scenario's fleet by the number of prefill slots.
    """

    weights_bytes: int
    fleet: Callable[[int], Mapping[str, Any]]
    policy: Mapping[str, Any] = field(default_factory=dict)


def _split(prefill_slots: int) -> Mapping[str, Any]:
    return {"prefill_slots": prefill_slots, "decode_slots": GPUS - prefill_slots}


def _gpus(_: int) -> Mapping[str, Any]:
    return {"gpus": GPUS}


SYSTEMS: Mapping[System, SystemPlan] = {
    "pooled": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_split),
    "pooled-both": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=lambda _: {"both_slots": GPUS}),
    "request-level": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_gpus),
    "request-level-prefetch": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_gpus),
    "request-level-sjf": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_gpus, policy={"switching": "shortest-first"}),
    "request-level-per-gpu": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_gpus, policy={"switching": "line-per-gpu"}),
    "request-level-split": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_split),
    "static": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_gpus),
    "dedicated": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=lambda _: {"gpus": GPUS, "models_per_gpu": 1}),
}
"""Tidepool's shared pools with disaggregated and with aggregated prefill and decode; request-level switching
(ServerlessLLM) with a global queue, the same with the next model prefetched into the memory that the pools have, with
the shortest job first (ServerlessLLM+), with per-GPU queues as in the artifact, and disaggregated with a global queue;
two models on each GPU for good (MuxServe); a GPU for each model.
"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What serves a workload. `slo_scale`: of both targets (Figure 13). `policy`: other than the defaults."""

    system: System = "pooled"
    profile: Path = ARTIFACT_PROFILE
    prefill_slots: int = 6
    slo_scale: float = 1.0
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of a workload. `models` at `rate` requests per second each; `draw`: 0 for the file's own; `unserved`:
    requests too long for a GPU.
    """

    system: System
    models: int
    rate: str
    draw: int
    slo_scale: float
    prefill_slots: int
    requests: int
    unserved: int
    service_attainment: float
    token_attainment: float
    switches: int
    busy_share: float
    seconds: float
    event_log_hash: str

    def keeps(self, metric: Metric) -> bool:
        """Whether all requests were served, with 90 % attainment by this metric."""
        return not self.unserved and self.attainment(metric) >= 0.9

    def attainment(self, metric: Metric) -> float:
        return self.service_attainment if metric == "service" else self.token_attainment


def scenario_of(setup: Setup, workload: Workload) -> Scenario:
    """One workload on the testbed."""
    plan = SYSTEMS[setup.system]
    serving = "static" if setup.system == "dedicated" else setup.system.partition("-")[0]
    return Scenario(
        name=f"{workload.name}, {setup.system}",
        regions=[REGION],
        targets={"IW-F": TargetPart(ttft_s=10.0 * setup.slo_scale, tbt_s=0.1 * setup.slo_scale)},
        traffic=AegaeonPart(kind="aegaeon", path=workload.path, workload=workload.name),
        models=MODELS,
        fleet=FleetPart.model_validate(
            {
                "serving": "request-level" if serving == "request" else serving,
                "profile": str(setup.profile),
                "kv_bytes": GPU_BYTES - plan.weights_bytes,
                "weights_bytes": plan.weights_bytes,
                **plan.fleet(setup.prefill_slots),
            }
        ),
        policy=PolicyPart.model_validate({**plan.policy, **setup.policy}),
    )


def measure(setup: Setup, workload: Workload, draw: int = 0) -> Row:
    """Serve a workload to its end."""
    outcome = simulate(scenario_of(setup, workload))
    result = outcome.result
    return Row(
        system=setup.system,
        models=workload.models,
        rate=workload.rate,
        draw=draw,
        slo_scale=setup.slo_scale,
        prefill_slots=setup.prefill_slots,
        requests=result.requests,
        unserved=sum(result.failures.values()),
        service_attainment=result.service_attainment,
        token_attainment=result.token_attainment,
        switches=sum(server.switches for server in outcome.world.present.servers),
        busy_share=result.busy_share,
        seconds=result.seconds,
        event_log_hash=result.event_log_hash,
    )


PUBLISHED: Mapping[System, str] = {
    "pooled": "72 (artifact, H100), 70 (paper, H800)",
    "request-level-per-gpu": "44",
    "static": "32",
    "dedicated": "16",
}
COLUMNS: Columns = {
    "system": "system",
    "models": "models",
    "rate": "rate",
    "draw": "draw",
    "SLO": "slo_scale",
    "prefill GPUs": "prefill_slots",
    "service": lambda row: f"{row['service_attainment']:.2%}",
    "token": lambda row: f"{row['token_attainment']:.2%}",
    "busy": lambda row: f"{row['busy_share']:.0%}",
    "switches": "switches",
}
LIMIT_COLUMNS: Columns = {
    "setup": "setup",
    "by service": lambda row: _range(row["service"]),
    "by token": lambda row: _range(row["token"]),
}
HOPELESS = 0.7
"""With this service attainment more models are not tried."""

app = typer.Typer(help=(__doc__ or "").partition("\n")[0], no_args_is_help=True, add_completion=False)
File = Annotated[Path, typer.Argument(metavar="WORKLOADS", help="Aegaeon's workloads.csv.gz.", dir_okay=False)]
Profile = Annotated[Path, typer.Option(help="A GPU profile: step times and the wire.", dir_okay=False)]
Systems = Annotated[list[str] | None, typer.Option("--system", help=f"Of {', '.join(SYSTEMS)}; all if not given.")]
Prefill = Annotated[
    list[int] | None,
    typer.Option(min=1, max=GPUS - 1, help="GPUs that prefill, of 16; the others decode. 6 if not given; repeatable."),
]
Scales = Annotated[list[float] | None, typer.Option(min=0.01, help="Of both targets, 10 s and 0.1 s.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it here: .png, .svg or .pdf.", dir_okay=False)]
Least = Annotated[int, typer.Option(min=2, help="Models at least.")]
Most = Annotated[int, typer.Option(min=2, help="Models at most; for more than 80 two workloads are merged.")]
Draws = Annotated[int, typer.Option(min=0, max=100, help="Workloads drawn anew at each size; 0: the file's own.")]
Every = Annotated[int, typer.Option(min=2, help="Steps of so many models.")]


@app.command()
def models(
    workloads: File,
    least: Least = 16,
    most: Most = 96,
    every: Every = 4,
    system: Systems = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Attainment by the number of models at rate 0.1, and how many keep 90 % (Figures 11a and 13)."""
    setups = _setups(system, profile, prefill_slots, slo_scale)
    found = _climb(workloads, (least, most, every), setups, plot)
    _show([asdict(row) for _, rows in found for row in rows], as_json)
    for setup, rows in found:
        _print_best(setup, rows)
    _draw("models", [(_named(setup), rows) for setup, rows in found], plot)


@app.command()
def limits(
    workloads: File,
    draws: Annotated[int, typer.Option(min=1, max=100, help="Workloads drawn anew, each with a limit of its own.")] = 5,
    least: Least = 16,
    most: Most = 160,
    every: Every = 2,
    system: Systems = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    as_json: AsJson = False,
) -> None:
    """How many models keep 90 % at rate 0.1 on each of several draws, by either metric, found by bisection."""
    setups = _setups(system, profile, prefill_slots, slo_scale)
    with work_folder() as folder:
        redraws = Redraws(workloads, folder)
        found = [_limits(setup, redraws, draws, range(least, most + 1, every)) for setup in setups]
    if as_json:
        print_json(found)
    else:
        print_table(f"Models at 90 %, mean and range of {draws} draws, 16 GPUs", LIMIT_COLUMNS, found)


@app.command()
def rates(
    workloads: File,
    draws: Draws = 0,
    system: Systems = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """40 models at rates from 0.05 to 0.7 each (Figure 11c)."""
    check_plot(plot)
    setups = _setups(system, profile, prefill_slots, slo_scale)
    with work_folder() as folder:
        sizes = [(0, each) for each in workloads_of(workloads) if each.models == HALF_AS_LONG]
        if draws:
            redraws = Redraws(workloads, folder)
            sizes = [
                (draw, redraws.workload(HALF_AS_LONG, each.rate, draw, duration_s=DURATION_S / 2))
                for _, each in sizes
                for draw in range(1, draws + 1)
            ]
        found = [(setup, [_measured(setup, each, draw) for draw, each in sizes]) for setup in setups]
    _show([asdict(row) for _, rows in found for row in rows], as_json)
    _draw("rate", [(_named(setup), rows) for setup, rows in found], plot)


def _limits(setup: Setup, redraws: Redraws, draws: int, sizes: Sequence[int]) -> dict[str, Any]:
    """The limits of a setup on each draw, by metric, and their means."""
    rows = [_rows_of(setup, redraws, draw) for draw in range(1, draws + 1)]
    found = {metric: [_limit(row_of, metric, sizes) for row_of in rows] for metric in METRICS}
    return {"setup": _named(setup)} | {name: {"mean": mean(limits), "draws": limits} for name, limits in found.items()}


def _rows_of(setup: Setup, redraws: Redraws, draw: int) -> Callable[[int], Row]:
    """The row of each number of models on a draw; each is measured once."""

    @cache
    def row_of(models: int) -> Row:
        return _measured(setup, redraws.workload(models, "0.1", draw, duration_s=DURATION_S), draw)

    return row_of


def _limit(row_of: Callable[[int], Row], metric: Metric, sizes: Sequence[int]) -> int:
    """The largest of the sizes that keeps 90 %, as if all smaller ones did too; 0: not even the first does."""
    place = bisect_left(sizes, True, key=lambda models: not row_of(models).keeps(metric))
    return sizes[place - 1] if place else 0


def _range(limit: Mapping[str, Any]) -> str:
    return f"{limit['mean']:.1f} ({min(limit['draws'])} to {max(limit['draws'])})"


def _climb(
    workloads: Path, steps: tuple[int, int, int], setups: Sequence[Setup], plot: Path | None
) -> list[tuple[Setup, list[Row]]]:
    """Measure each setup with more and more models, until its attainment is hopeless."""
    check_plot(plot)
    found: list[tuple[Setup, list[Row]]] = []
    with _sizes(workloads, *steps) as sizes:
        for setup in setups:
            rows: list[Row] = []
            for each in sizes:
                rows.append(_measured(setup, each))
                if rows[-1].service_attainment < HOPELESS:
                    break
            found.append((setup, rows))
    return found


@contextmanager
def _sizes(workloads: Path, least: int, most: int, every: int) -> Iterator[list[Workload]]:
    """The workloads at rate 0.1; those of the size of two different ones together are merged of these. That of 40
    models is half as long as the others, and left out.
    """
    single = {
        each.models: each for each in workloads_of(workloads) if each.rate == "0.1" and each.models != HALF_AS_LONG
    }
    largest = max(single, default=0)
    with work_folder() as folder:
        sizes = []
        for models in range(least, most + 1, every):
            halves = [
                (one, models - one) for one in range(models // 2 - 1, 0, -1) if {one, models - one} <= set(single)
            ]
            if models in single:
                sizes.append(single[models])
            elif models > largest and halves:
                first, second = halves[0]
                sizes.append(merged(single[first], single[second], folder))
        if not sizes:
            raise typer.BadParameter(f"{workloads} has no workload of {least} to {most} models at rate 0.1")
        yield sizes


def _measured(setup: Setup, workload: Workload, draw: int = 0) -> Row:
    row = measure(setup, workload, draw)
    notes().print(
        f"{row.system} {row.models} models at {row.rate}, draw {row.draw}, SLO x {row.slo_scale:g}: service"
        f" {row.service_attainment:.2%}, token {row.token_attainment:.2%}, {row.requests} requests"
        f" in {row.seconds:.1f} s"
    )
    return row


def _setups(
    systems: list[str] | None, profile: Path, prefill_slots: list[int] | None, scales: list[float] | None
) -> list[Setup]:
    return [
        Setup(system=one, profile=profile, prefill_slots=slots, slo_scale=scale)
        for scale in scales or [1.0]
        for one in chosen(systems, SYSTEMS, "--system")
        for slots in prefill_slots or [6]
    ]


def _named(setup: Setup) -> str:
    split = "" if setup.prefill_slots == 6 else f", {setup.prefill_slots} + {GPUS - setup.prefill_slots} GPUs"
    return f"{setup.system}, SLO x {setup.slo_scale:g}{split}"


def _show(rows: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(list(rows))
    else:
        print_table("Aegaeon's workloads, 16 GPUs", COLUMNS, rows)


def _print_best(setup: Setup, rows: Sequence[Row]) -> None:
    best = {metric: max((row.models for row in rows if row.keeps(metric)), default=0) for metric in METRICS}
    published = PUBLISHED.get(setup.system) if setup.slo_scale == 1.0 else None
    against = f"; published: {published}" if published else ""
    notes().print(
        f"{_named(setup)}: {best['service']} models at 90 % service attainment, {best['token']} at 90 % of tokens in"
        f" time{against}"
    )


def _draw(against: str, lines: Sequence[tuple[str, Sequence[Row]]], plot: Path | None) -> None:
    if plot is None:
        return
    panels = [
        LinesPanel(
            title=f"{metric} attainment",
            x_label="models" if against == "models" else "requests/s of each of 40 models",
            y_label="share",
            lines={
                name: [(float(getattr(row, against)), row.attainment(metric)) for row in rows] for name, rows in lines
            },
            kept=0.9,
        )
        for metric in METRICS
    ]
    draw_lines(panels, "Aegaeon's workloads on 16 GPUs", plot)


if __name__ == "__main__":
    app()
