"""Many models that are rarely used, in the simulator: `python -m ops.bench.papers.aegaeon_fleet --help`.

`active`: the number of models with a request in service, against theorem 3.1: M (1 - exp(-rate T)).
`gpus`: a fleet shaped like section 7.5: 28 models of 1.8B to 7B on one H20 each, 19 of 32B to 72B on four. Of the
rates, 0.037 on average and 1.13 at most, one model has the highest. Published: 1,192 GPUs before, 213 after. The 1,192
held many instances of each model, for peaks and failures in several regions, which nobody outside can simulate: what is
compared here are the least numbers, with an instance of each model alone, and pooled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from dataplane.scheduling.attainment import expected_active_models
from dataplane.scheduling.profile import load_gpu_profile
from ops.bench.papers.workloads import write_workload
from ops.bench.shared import check_plot, work_folder
from ops.client.screen import AsJson, notes, print_fields, print_json, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines
from ops.simulator.kernel.events import Kind
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.scenario import PROFILES, FleetPart, ModelPart, PolicyPart, Scenario, TargetPart
from ops.simulator.servers.pool import PoolServer
from ops.simulator.traffic.traces import Recorded
from ops.simulator.traffic.traffic_parts import AegaeonPart

H20 = PROFILES / "h20.toml"
TP4_EFFICIENCY = 0.8
"""Four GPUs together do this share of four times the work of one: an assumption, no profile of it was published."""
PUBLISHED = {"before": 1192, "after": 213}
SMALL = [
    ModelPart(name=f"s{n}", weights_bytes=w * 10**9, kv_bytes_per_token=57_344) for n, w in enumerate((4, 8, 14, 15))
]
LARGE = [ModelPart(name=f"l{n}", weights_bytes=w * 10**9, kv_bytes_per_token=300_000) for n, w in enumerate((64, 144))]
SPLITS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 4), (3, 5), (4, 6), (5, 8), (6, 10))
"""Slots that prefill and slots that decode, in the order in which they are tried."""

app = typer.Typer(help=(__doc__ or "").partition("\n")[0], no_args_is_help=True, add_completion=False)
Duration = Annotated[float, typer.Option(min=10.0, help="Seconds of traffic.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the traffic.")]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the deployments. `gpus`: of a slot; `rates_per_s` of each of its models."""

    name: str
    kinds: Sequence[ModelPart]
    gpus: int
    rates_per_s: Sequence[float]


def parts_of(mean_per_s: float = 0.037, most_per_s: float = 1.13) -> tuple[Part, Part]:
    """The two deployments. The busiest model is a small one."""
    rest_per_s = (47 * mean_per_s - most_per_s) / 46
    return (
        Part(name="1.8B to 7B", kinds=SMALL, gpus=1, rates_per_s=[most_per_s, *[rest_per_s] * 27]),
        Part(name="32B to 72B", kinds=LARGE, gpus=4, rates_per_s=[rest_per_s] * 19),
    )


@app.command()
def active(
    models: Annotated[int, typer.Option(min=1, help="M.")] = 100,
    rate_per_s: Annotated[float, typer.Option(min=1e-4, help="Of each model.")] = 0.037,
    duration_s: Duration = 300.0,
    seed: Seed = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw it here: .png, .svg or .pdf.", dir_okay=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Models with a request in service over time, against theorem 3.1."""
    check_plot(plot)
    part = Part(name="all", kinds=SMALL, gpus=1, rates_per_s=[rate_per_s] * models)
    with work_folder() as folder:
        world, _, _ = build_world(_scenario(part, (6, 10), duration_s, seed, folder), seed)
        (pool,) = (server for server in world.present.servers if isinstance(server, PoolServer))
        points: list[tuple[float, float]] = []

        def sample() -> None:
            points.append((world.events.now_s, float(pool.active_models)))
            if world.events.now_s + 1.0 <= duration_s:
                world.events.at(world.events.now_s + 1.0, Kind.TICK, sample)

        world.events.at(0.0, Kind.TICK, sample)
        for _ in world.run():
            pass
    served = sum(tally.ended for tally in world.tallies.values())
    service_s = sum(tally.service.sum_s for tally in world.tallies.values()) / served
    steady = [count for at_s, count in points if at_s >= 3 * service_s]
    found = {
        "models": models,
        "service_s": service_s,
        "active_mean": float(np.mean(steady)),
        "active_max": max(steady),
        "theorem": expected_active_models(models, rate_per_s, service_s),
    }
    if plot is not None:
        lines = {"in service": points, "theorem 3.1": [(0.0, found["theorem"]), (duration_s, found["theorem"])]}
        panel = LinesPanel(title="Active models", x_label="s", y_label="models", lines=lines, shares=False)
        draw_lines([panel], f"{models} models at {rate_per_s:g} requests/s each", plot)
    if as_json:
        print_json(found)
    else:
        print_fields([(name, f"{value:,.2f}") for name, value in found.items()])


@app.command()
def gpus(
    duration_s: Duration = 300.0,
    seed: Seed = 1,
    attainment: Annotated[float, typer.Option(min=0.5, max=1.0, help="Service attainment to be kept.")] = 0.99,
    as_json: AsJson = False,
) -> None:
    """The fewest GPUs that serve a fleet shaped like section 7.5, dedicated and pooled."""
    rows = [asdict(_fewest(part, duration_s, seed, attainment)) for part in parts_of()]
    dedicated, pooled = (sum(row[name] for row in rows) for name in ("dedicated_gpus", "pooled_gpus"))
    if as_json:
        print_json({"rows": rows, "dedicated_gpus": dedicated, "pooled_gpus": pooled, "published": PUBLISHED})
        return
    columns = {"models": "name", "dedicated": "dedicated_gpus", "pooled": "pooled_gpus"}
    print_table("GPUs at least", {**columns, "attainment": lambda row: f"{row['attainment']:.2%}"}, rows)
    saved, published = 1 - pooled / dedicated, 1 - PUBLISHED["after"] / PUBLISHED["before"]
    notes().print(f"{dedicated} -> {pooled} GPUs, {saved:.0%} saved; published 1,192 -> 213, {published:.0%}")


@dataclass(frozen=True, kw_only=True)
class Fewest:
    """The fewest GPUs of a deployment, and what the pool's requests got."""

    name: str
    dedicated_gpus: int
    pooled_gpus: int
    attainment: float


def _fewest(part: Part, duration_s: float, seed: int, attainment: float) -> Fewest:
    with work_folder() as folder:
        for split in SPLITS:
            result = simulate(_scenario(part, split, duration_s, seed, folder), seed=seed).result
            notes().print(f"{part.name}, {split[0]} + {split[1]} slots: {result.service_attainment:.2%}")
            if result.service_attainment >= attainment:
                return Fewest(
                    name=part.name,
                    dedicated_gpus=len(part.rates_per_s) * part.gpus,
                    pooled_gpus=sum(split) * part.gpus,
                    attainment=result.service_attainment,
                )
    raise typer.BadParameter(f"{SPLITS[-1]} slots of {part.name} do not keep it", param_hint="--attainment")


def _scenario(part: Part, split: tuple[int, int], duration_s: float, seed: int, folder: Path) -> Scenario:
    """A deployment as a shared pool. A slot's memory holds two of its largest models."""
    largest_bytes = max(model.weights_bytes for model in part.kinds)
    memory_bytes = int(0.9 * load_gpu_profile(H20).memory_bytes) * part.gpus
    workload = write_workload(folder / "traffic.csv", _requests(part, duration_s, seed))
    return Scenario(
        name=f"{part.name}, {split[0]} + {split[1]} slots",
        regions=["one"],
        targets={"IW-F": TargetPart(ttft_s=10.0, tbt_s=0.1)},
        traffic=AegaeonPart(kind="aegaeon", path=workload.path, workload=workload.name),
        models=list(part.kinds),
        fleet=FleetPart(
            serving="pooled",
            profile=str(_write_profile(part, folder / "profile.toml")),
            kv_bytes=memory_bytes - 2 * largest_bytes,
            weights_bytes=2 * largest_bytes,
            prefill_slots=split[0],
            decode_slots=split[1],
        ),
        policy=PolicyPart(),
    )


def _requests(part: Part, duration_s: float, seed: int) -> Iterator[Recorded]:
    """Poisson arrivals of each model, with lengths like ShareGPT's."""
    rng = np.random.default_rng(seed)
    arrivals: list[tuple[float, int]] = []
    for model, rate_per_s in enumerate(part.rates_per_s):
        count = rng.poisson(rate_per_s * duration_s)
        arrivals += [(float(at_s), model) for at_s in rng.uniform(0.0, duration_s, count)]
    for at_s, model in sorted(arrivals):
        prompt, output = (int(np.clip(rng.lognormal(np.log(median), 1.0), 4, 2000)) for median in (150, 200))
        yield Recorded(time_s=at_s, model=f"m_{model}", prompt_tokens=prompt, output_tokens=output)


def _write_profile(part: Part, path: Path) -> Path:
    """The H20's profile for a slot of so many GPUs; times of models larger than the measured ones are scaled up."""
    profile = load_gpu_profile(H20)
    lines = [
        f'gpu_type = "{part.gpus} x H20"',
        f"memory_bytes = {profile.memory_bytes * part.gpus}",
        f"pcie_bytes_per_s = {profile.pcie_bytes_per_s * part.gpus}",
        f"transfer_efficiency = {profile.transfer_efficiency}",
        f"cost_per_hour = {profile.cost_per_hour * part.gpus}",
    ]
    for model in part.kinds:
        lines += model_lines(model, split=part.gpus, gpus=1)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def model_lines(model: ModelPart, *, split: int, gpus: int) -> list[str]:
    """A model in a profile made from the H20's: on `split` of its GPUs together, which are `gpus` of the profile."""
    measured = load_gpu_profile(H20).nearest_model(model.weights_bytes)
    bigger = max(1.0, model.weights_bytes / measured.weights_bytes)
    factor = bigger / (split * TP4_EFFICIENCY if split > 1 else 1.0)
    times: Mapping[str, float] = asdict(measured.latency)
    lines = ["[[models]]", f'name = "{model.name}"', f'source = "{measured.name} x {factor:g}"', f"gpus = {gpus}"]
    lines.append(f"weights_bytes = {model.weights_bytes}")
    return lines + [f"{name} = {s * factor!r}" for name, s in times.items()]


if __name__ == "__main__":
    app()
