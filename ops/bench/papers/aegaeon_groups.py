"""Pools of mixed parallelism in the simulator: `python -m ops.bench.papers.aegaeon_groups --help`.

The fleet of Aegaeon's section 7.5 (see `aegaeon_fleet`): 28 models of 1.8B to 7B on one GPU, 19 of 32B to 72B on four.
Two fixed pools, one of slots of one GPU and one of slots of four, against one pool of nodes of four GPUs, regrouped as
`choose_layouts` asks: the fewest GPUs of each that keep the attainment. All slots prefill and decode, and a GPU has the
same memory for weights and for KV in all of them.

`--night` below 1: traffic of two halves. In the first the large models have so much of their rates, in the second the
small ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer

from dataplane.scheduling.profile import load_gpu_profile
from ops.bench.papers.aegaeon_fleet import H20, LARGE, Part, model_lines, parts_of
from ops.bench.papers.workloads import model_name, write_workload
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.run import number_of, simulate
from ops.simulator.scenario.planning import RegroupPart
from ops.simulator.scenario.scenario import FleetPart, ModelPart, PolicyPart, Scenario, TargetPart
from ops.simulator.traffic.traces import Recorded
from ops.simulator.traffic.traffic_parts import AegaeonPart

LARGE_GPUS = 4
GPUS_MAX = 64
FOURS_MAX = 3
"""Slots of four at the beginning that are tried; the others come by regrouping."""
Layouts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """`small`: what the rates of the models of one GPU are multiplied by. `night`: see the module."""

    duration_s: float
    night: float
    small: float
    seed: int

    def requests(self, parts: Sequence[Part]) -> Iterator[Recorded]:
        """Poisson arrivals of each model, with lengths like ShareGPT's. Only those of `parts`, which are numbered as
        those of the whole fleet are.
        """
        rng = np.random.default_rng(self.seed)
        arrivals: list[tuple[float, int, int, int]] = []
        number = 0
        for part in parts_of():
            for rate_per_s in part.rates_per_s:
                for half in (0, 1):
                    busy = (half == 0) == (part.gpus == 1)
                    factor = (self.small if part.gpus == 1 else 1.0) * (1.0 if busy else self.night)
                    mean = rate_per_s * factor * self.duration_s / 2
                    times_s = (half + rng.random(rng.poisson(mean))) * self.duration_s / 2
                    lengths = [rng.lognormal(np.log(median), 1.0, times_s.size) for median in (150, 200)]
                    prompts, outputs = (np.clip(each, 4, 2000).astype(int).tolist() for each in lengths)
                    if part in parts:
                        arrivals += zip(times_s.tolist(), [number] * times_s.size, prompts, outputs, strict=True)
                number += 1
        for at_s, model, prompt, output in sorted(arrivals):
            yield Recorded(time_s=at_s, model=model_name(model), prompt_tokens=prompt, output_tokens=output)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fleet that keeps the attainment. `layouts`: of its nodes at the beginning; `small`, `large`: attainment of the
    models of one GPU and of four.
    """

    fleet: str
    gpus: int
    layouts: str
    attainment: float
    small: float | None
    large: float | None


COLUMNS: Columns = {
    "fleet": "fleet",
    "GPUs": "gpus",
    "layouts at first": "layouts",
    "attainment": lambda row: f"{row['attainment']:.2%}",
    "1 GPU": lambda row: _share(row["small"]),
    "4 GPUs": lambda row: _share(row["large"]),
}


def main(
    duration_s: Annotated[float, typer.Option(min=600.0, help="Seconds of traffic.")] = 7200.0,
    night: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of their rates that quiet models have.")] = 1.0,
    small: Annotated[float, typer.Option(min=0.1, max=50.0, help="Multiplies the rates of the small models.")] = 1.0,
    least: Annotated[int, typer.Option(min=1, max=GPUS_MAX - 1, help="GPUs from which on fleets are tried.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the traffic.")] = 1,
    attainment: Annotated[float, typer.Option(min=0.5, max=1.0, help="Service attainment to be kept.")] = 0.99,
    hold_s: Annotated[float, typer.Option(min=0.0, help="How long a node keeps a layout.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """The fewest GPUs that serve a fleet shaped like section 7.5, in two fixed pools and in one that is regrouped."""
    traffic = Traffic(duration_s=duration_s, night=night, small=small, seed=seed)
    ones, fours = parts_of()
    with work_folder() as folder:
        tries = Tries(traffic, folder, attainment)
        rows = [
            tries.fewest("slots of 1, fixed", [ones], ([(1,)] * count for count in range(least, GPUS_MAX)), None),
            tries.fewest("slots of 4, fixed", [fours], ([(4,)] * count for count in range(1, GPUS_MAX // 4)), None),
            tries.fewest(
                "regrouped",
                [ones, fours],
                (layouts for layouts in _beginnings() if sum(map(sum, layouts)) >= least),
                RegroupPart(hold_s=hold_s),
            ),
        ]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_table("GPUs at least", COLUMNS, [asdict(row) for row in rows])


def _beginnings() -> Iterator[Layouts]:
    """More and more nodes of four GPUs; of as many, first those with most slots of one. Each size has one at least."""
    for nodes in range(2, GPUS_MAX // 4):
        for fours in range(1, min(nodes, FOURS_MAX + 1)):
            yield [(4,)] * fours + [(1,) * 4] * (nodes - fours)


class Tries:
    """Fleets tried one after the other, until one keeps the attainment."""

    def __init__(self, traffic: Traffic, folder: Path, attainment: float) -> None:
        self._traffic = traffic
        self._folder = folder
        self._attainment = attainment

    def fewest(self, name: str, parts: Sequence[Part], fleets: Iterator[Layouts], regroup: RegroupPart | None) -> Row:
        """The first of the fleets whose requests keep the attainment, those of each size by themselves."""
        for layouts in fleets:
            row = self._try(name, parts, layouts, regroup)
            notes().print(f"{name}, {row.layouts}: {row.attainment:.2%} ({_share(row.small)}, {_share(row.large)})")
            if min(share for share in (row.small, row.large) if share is not None) >= self._attainment:
                return row
        raise typer.BadParameter(f"{GPUS_MAX} GPUs do not keep it: {name}", param_hint="--attainment")

    def _try(self, name: str, parts: Sequence[Part], layouts: Layouts, regroup: RegroupPart | None) -> Row:
        scenario = scenario_of(self._traffic, parts, layouts, regroup, self._folder)
        result = simulate(scenario, seed=self._traffic.seed).result
        shares: dict[int, list[tuple[float, int]]] = {1: [], LARGE_GPUS: []}
        for row in result.rows:
            gpus = scenario.models[number_of(row.model or "")].gpus
            assert isinstance(gpus, int)
            shares[gpus].append((row.service_attainment, row.requests))
        means = {gpus: fmean(*zip(*rows, strict=True)) if rows else None for gpus, rows in shares.items()}
        return Row(
            fleet=name,
            gpus=sum(map(sum, layouts)),
            layouts=_counted(layouts),
            attainment=result.service_attainment,
            small=means[1],
            large=means[LARGE_GPUS],
        )


def scenario_of(
    traffic: Traffic, parts: Sequence[Part], layouts: Layouts, regroup: RegroupPart | None, folder: Path
) -> Scenario:
    """The models of these parts on nodes with these layouts. A slot's memory holds two of the largest models of four
    GPUs, a slot of one GPU a quarter of that.
    """
    weights_bytes = 2 * max(model.weights_bytes for model in LARGE) // LARGE_GPUS
    path = folder / f"{'-'.join(str(part.gpus) for part in parts)}.csv"
    workload = write_workload(path, traffic.requests(parts))
    return Scenario(
        name=f"{_counted(layouts)} slots",
        regions=["one"],
        targets={"IW-F": TargetPart(ttft_s=10.0, tbt_s=0.1)},
        traffic=AegaeonPart(kind="aegaeon", path=workload.path, workload=workload.name),
        models=list(_models(parts, layouts)),
        fleet=FleetPart(
            serving="pooled",
            profile=str(_write_profile(folder / "profile.toml")),
            kv_bytes=int(0.9 * load_gpu_profile(H20).memory_bytes) - weights_bytes,
            weights_bytes=weights_bytes,
            layouts=list(layouts),
            regroup=regroup,
        ),
        policy=PolicyPart(time_slices="rounds"),
    )


def _models(parts: Sequence[Part], layouts: Layouts) -> Iterator[ModelPart]:
    """All models of the fleet in the order of their numbers; those without traffic fit any slot there is."""
    for part in parts_of():
        gpus = part.gpus if part in parts else layouts[0][0]
        for number in range(len(part.rates_per_s)):
            model = part.kinds[number % len(part.kinds)]
            yield model.model_copy(update={"name": f"{model.name}-{number}", "gpus": gpus})


def _write_profile(path: Path) -> Path:
    """The H20's profile, with the models of one GPU and those of four."""
    profile = load_gpu_profile(H20)
    lines = [
        'gpu_type = "H20"',
        f"memory_bytes = {profile.memory_bytes}",
        f"pcie_bytes_per_s = {profile.pcie_bytes_per_s}",
        f"transfer_efficiency = {profile.transfer_efficiency}",
        f"cost_per_hour = {profile.cost_per_hour}",
    ]
    for part in parts_of():
        for model in part.kinds:
            lines += model_lines(model, split=part.gpus, gpus=part.gpus)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _counted(layouts: Layouts) -> str:
    counts: Mapping[int, int] = {size: sum(layout.count(size) for layout in layouts) for size in (LARGE_GPUS, 1)}
    return " + ".join(f"{count} x {size}" for size, count in counts.items() if count)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


if __name__ == "__main__":
    typer.run(main)
