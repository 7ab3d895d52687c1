"""Aegaeon's Figure 17 in the simulator, smaller GPUs and larger models: see `--help` of
`python -m ops.bench.papers.aegaeon_hardware`.

Lengths of ShareGPT and Poisson arrivals as in its artifact, drawn anew. Token k is due 10 s + k * 0.1 s after its
request arrived; one of both is scaled. `a10`: more and more models of 6B and 7B on four A10, two of which prefill, at
0.1 requests/s each. Two models do not fit on one, so nothing is prefetched. `large`: four models of 72B on eight H800,
a slot of four that prefills and one that decodes, at more and more requests/s. The figure's values are not printed in
the paper; what it says is that attainment is "decent" and that looser objectives keep many more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import typer

from ops.bench.papers.workloads import Redraws, Workload
from ops.bench.shared import check_plot, chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines
from ops.profiling.cards import CARDS
from ops.profiling.guess import TRANSFER_EFFICIENCY, guess_times
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import PROFILES, FleetPart, ModelPart, PolicyPart, Scenario, TargetPart
from ops.simulator.traffic.traffic_parts import AegaeonPart

DURATION_S, KEPT = 120.0, 0.9
System = Literal["pooled", "pooled-both", "pooled-both-deadlines", "request-level"]
SYSTEMS: tuple[System, ...] = ("pooled", "pooled-both", "pooled-both-deadlines", "request-level")
"""As in `aegaeon_testbed`; request-level serving has one queue."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A node of equal slots, and its models. `kv_bytes` and `weights_bytes` of a slot's memory: for one model, so that
    nothing is prefetched.
    """

    slots: int
    models: Sequence[ModelPart]
    profile: Path
    kv_bytes: int
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """Of one system at one objective: `models` at `rate` requests/s each. Shares in time by draw; `unserved`: requests
    too long for a slot.
    """

    system: System
    scaled: str
    models: int
    rate: float
    service: Sequence[float]
    tokens: Sequence[float]
    unserved: int


def a10() -> Hardware:
    """Four A10: of 24 GiB, a tenth is the engine's."""
    models = [
        ModelPart(name="7B", weights_bytes=15_231_233_024, kv_bytes_per_token=57_344),  # Qwen2.5-7B
        ModelPart(name="6B", weights_bytes=12_122_079_232, kv_bytes_per_token=65_536),  # Yi-1.5-6B
    ]
    return _hardware(4, models, PROFILES / "a10.toml", int(0.9 * CARDS["A10"].memory_bytes))


def eight_h800(folder: Path) -> Hardware:
    """Two slots of four H800 and models like Qwen2.5-72B. Its step times on four were published by nobody: a guess from
    the data sheet, and from what smaller models take on four.
    """
    card, kv_bytes_per_token = CARDS["H800"], 327_680
    model = ModelPart(name="72B", weights_bytes=145_412_407_296, kv_bytes_per_token=kv_bytes_per_token)
    times = guess_times(model.weights_bytes, kv_bytes_per_token, card, gpus=4)
    lines = [
        'gpu_type = "4 x H800"',
        f"memory_bytes = {4 * card.memory_bytes}",
        f"pcie_bytes_per_s = {4 * card.pcie_bytes_per_s}",
        f"transfer_efficiency = {TRANSFER_EFFICIENCY}",
        "cost_per_hour = 10.0",
        "[[models]]",
        'name = "72B"',
        'source = "a guess"',
        "gpus = 1",
        f"weights_bytes = {model.weights_bytes}",
        *(f"{name} = {seconds!r}" for name, seconds in asdict(times.latency).items()),
    ]
    path = folder / "4xh800.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return _hardware(2, [model], path, int(0.9 * 4 * card.memory_bytes))


def _hardware(slots: int, models: Sequence[ModelPart], profile: Path, memory_bytes: int) -> Hardware:
    largest_bytes = max(model.weights_bytes for model in models)
    return Hardware(
        slots=slots,
        models=models,
        profile=profile,
        kv_bytes=memory_bytes - largest_bytes,
        weights_bytes=largest_bytes,
    )


def scenario_of(hardware: Hardware, system: System, workload: Workload, target: TargetPart) -> Scenario:
    """A workload on a node; where slots are split, half of them prefill."""
    half = hardware.slots // 2
    fleet: Mapping[System, Mapping[str, Any]] = {
        "pooled": {"prefill_slots": half, "decode_slots": half},
        "request-level": {"gpus": hardware.slots},
    }
    slices = "deadlines" if system == "pooled-both-deadlines" else "rounds"
    return Scenario(
        name=f"{workload.name}, {system}",
        regions=["one"],
        targets={"IW-F": target},
        traffic=AegaeonPart(kind="aegaeon", path=workload.path, workload=workload.name),
        models=list(hardware.models),
        fleet=FleetPart.model_validate(
            {
                "serving": "request-level" if system == "request-level" else "pooled",
                "profile": str(hardware.profile),
                "kv_bytes": hardware.kv_bytes,
                "weights_bytes": hardware.weights_bytes,
                **fleet.get(system, {"both_slots": hardware.slots}),
            }
        ),
        policy=PolicyPart(prefetch=False, time_slices=slices),
    )


app = typer.Typer(help=(__doc__ or "").partition("\n")[0], no_args_is_help=True, add_completion=False)
File = Annotated[Path, typer.Argument(metavar="WORKLOADS", help="Aegaeon's workloads.csv.gz.", dir_okay=False)]
Draws = Annotated[int, typer.Option(min=1, max=100, help="Workloads drawn anew at each point.")]
Scales = Annotated[list[float] | None, typer.Option(min=0.01, help="Of the objective; 0.5, 1 and 2 if not given.")]
Systems = Annotated[list[str] | None, typer.Option("--system", help=f"Of {', '.join(SYSTEMS)}; all if not given.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it here: .png, .svg or .pdf.", dir_okay=False)]


@app.command("a10")
def on_a10(
    workloads: File,
    models: Annotated[list[int] | None, typer.Option(min=2, help="So many; 2 to 24 by 2 if not given.")] = None,
    draws: Draws = 3,
    scale: Scales = None,
    system: Systems = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Models of 6B and 7B on four A10 at 0.1 requests/s each; the time between tokens is scaled (Figure 17, left)."""
    points = [(count, 0.1) for count in models or range(2, 26, 2)]
    targets = {f"TBT x {one:g}": TargetPart(ttft_s=10.0, tbt_s=0.1 * one) for one in scale or (0.5, 1.0, 2.0)}
    check_plot(plot)
    with work_folder() as folder:
        found = _measured(
            a10(), chosen(system, SYSTEMS, "--system"), points, targets, draws, Redraws(workloads, folder)
        )
    _tell(found, "models", plot, as_json)


@app.command()
def large(
    workloads: File,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Requests/s of each of four models; 0.1 to 1 if not given.")
    ] = None,
    draws: Draws = 3,
    scale: Scales = None,
    system: Systems = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Four models of 72B on eight H800, four GPUs each; the time to the first token is scaled (Figure 17, right)."""
    points = [(4, one) for one in rate or (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)]
    targets = {f"TTFT x {one:g}": TargetPart(ttft_s=10.0 * one, tbt_s=0.1) for one in scale or (0.5, 1.0, 2.0)}
    check_plot(plot)
    with work_folder() as folder:
        systems = chosen(system, SYSTEMS, "--system")
        found = _measured(eight_h800(folder), systems, points, targets, draws, Redraws(workloads, folder))
    _tell(found, "rate", plot, as_json)


def _measured(
    hardware: Hardware,
    systems: Sequence[System],
    points: Sequence[tuple[int, float]],
    targets: Mapping[str, TargetPart],
    draws: int,
    redraws: Redraws,
) -> list[Point]:
    found = []
    for system in systems:
        for scaled, target in targets.items():
            for models, rate in points:
                results = [
                    simulate(scenario_of(hardware, system, workload, target)).result
                    for draw in range(1, draws + 1)
                    for workload in [redraws.workload(models, f"{rate:g}", draw, duration_s=DURATION_S)]
                ]
                found.append(
                    Point(
                        system=system,
                        scaled=scaled,
                        models=models,
                        rate=rate,
                        service=[result.service_attainment for result in results],
                        tokens=[result.token_attainment for result in results],
                        unserved=sum(sum(result.failures.values()) for result in results),
                    )
                )
            notes().print(f"{system}, {scaled}: {len(points)} points of {draws} draws")
    return found


def kept(points: Sequence[Point], metric: str, by: str) -> float:
    """The largest number of models, or requests/s, up to which every point keeps 90 % in the mean of its draws; 0 if
    the first does not.
    """
    best = 0.0
    for point in sorted(points, key=lambda one: getattr(one, by)):
        if point.unserved or mean(getattr(point, metric)) < KEPT:
            break
        best = float(getattr(point, by))
    return best


def _tell(found: Sequence[Point], by: str, plot: Path | None, as_json: bool) -> None:
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        lines.setdefault((point.system, point.scaled), []).append(point)
    limits = [
        {"system": system, "scaled": scaled} | {metric: kept(points, metric, by) for metric in ("service", "tokens")}
        for (system, scaled), points in lines.items()
    ]
    if as_json:
        print_json({"points": [asdict(point) for point in found], "kept": limits})
    else:
        columns: Columns = {
            "system": "system",
            "objective": "scaled",
            by: by,
            "service": lambda row: f"{mean(row['service']):.1%}",
            "tokens": lambda row: f"{mean(row['tokens']):.1%}",
        }
        print_table("In time, means of the draws", columns, [asdict(point) for point in found])
        kept_columns: Columns = {"system": "system", "objective": "scaled", "service": "service", "tokens": "tokens"}
        print_table(f"{by} up to which 90 % are kept", kept_columns, limits)
    if plot is not None:
        panels = [
            LinesPanel(
                title=f"{metric} in time",
                x_label=by if by == "models" else "requests/s of each of 4 models",
                y_label="share",
                lines={
                    f"{system}, {scaled}": [(float(getattr(one, by)), mean(getattr(one, metric))) for one in points]
                    for (system, scaled), points in lines.items()
                },
                kept=KEPT,
            )
            for metric in ("service", "tokens")
        ]
        draw_lines(panels, "Aegaeon's Figure 17", plot)


if __name__ == "__main__":
    app()
