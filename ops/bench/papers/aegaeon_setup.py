"""Aegaeon's testbed and workloads as scenarios: 16 GPUs, ShareGPT lengths, Poisson arrivals, models of 7B to 13B.

Token k is due 10 s + k * 0.1 s after its request came. Step times: the artifact's H100 profiles, where a switch takes
bytes / 16 GB/s, as its simulator assumes; or any other profile.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forecasts.importers.lines import open_csv
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
"""Model i of a workload is the one at place i modulo 10: Qwen2.5-7B, Yi-1.5-9B, Llama-2-13B, two bytes a parameter."""
LARGEST_BYTES = MODELS[-1].weights_bytes
TWO_MODELS_BYTES = 53 * 10**9
"""Two of the largest, so that one can come while the other runs."""
GPU_BYTES = 76 * 10**9
"""Of 80 GiB; the rest is the engine's."""

System = Literal[
    "pooled",
    "pooled-both",
    "request-level",
    "request-level-sjf",
    "request-level-line",
    "request-level-split",
    "static",
    "dedicated",
]


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """How a system uses the GPUs. `weights_bytes`: of a GPU's memory; the rest is for KV. `fleet` by prefill slots."""

    what: str
    weights_bytes: int
    fleet: Callable[[int], Mapping[str, Any]]
    policy: Mapping[str, Any] = field(default_factory=dict)


def _split(prefill_slots: int) -> Mapping[str, Any]:
    return {"prefill_slots": prefill_slots, "decode_slots": GPUS - prefill_slots}


def _gpus(_: int) -> Mapping[str, Any]:
    return {"gpus": GPUS}


SYSTEMS: Mapping[System, SystemPlan] = {
    "pooled": SystemPlan(
        what="Tidepool's pools, slots that prefill and slots that decode", weights_bytes=TWO_MODELS_BYTES, fleet=_split
    ),
    "pooled-both": SystemPlan(
        what="Tidepool's pools, every slot does both",
        weights_bytes=TWO_MODELS_BYTES,
        fleet=lambda _: {"both_slots": GPUS},
    ),
    "request-level": SystemPlan(
        what="GPUs that switch when idle (ServerlessLLM), one line for all", weights_bytes=LARGEST_BYTES, fleet=_gpus
    ),
    "request-level-sjf": SystemPlan(
        what="the same, shortest job first (ServerlessLLM+)",
        weights_bytes=LARGEST_BYTES,
        fleet=_gpus,
        policy={"switching": "shortest-first"},
    ),
    "request-level-line": SystemPlan(
        what="the same, a line at each GPU, as the artifact has it",
        weights_bytes=LARGEST_BYTES,
        fleet=_gpus,
        policy={"switching": "line-per-gpu"},
    ),
    "request-level-split": SystemPlan(
        what="one line, GPUs that prefill and GPUs that decode", weights_bytes=LARGEST_BYTES, fleet=_split
    ),
    "static": SystemPlan(what="two models a GPU for good (MuxServe)", weights_bytes=TWO_MODELS_BYTES, fleet=_gpus),
    "dedicated": SystemPlan(
        what="a GPU for each model", weights_bytes=LARGEST_BYTES, fleet=lambda _: {"gpus": GPUS, "models_per_gpu": 1}
    ),
}


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
    """What came of a workload. `models` at `rate` requests per second each; `unserved`: requests no GPU could take."""

    system: System
    models: int
    rate: str
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

    @property
    def kept(self) -> bool:
        """Whether all were served, and 90 % of the service was in time."""
        return not self.unserved and self.service_attainment >= 0.9


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One of a file, with unscaled lengths. `rate`: requests per second and model."""

    path: Path
    name: str
    models: int
    rate: str


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


def workloads_of(path: Path) -> list[Workload]:
    """Those of a file with unscaled lengths, by number of models, then by rate.

    Raises:
        forecasts.importers.lines.DemandFileError: it cannot be read.
    """
    pattern = re.compile(r"synth-(\d+)-([0-9.]+)-1\.0-1\.0")
    with open_csv(path) as file:
        names = {line.word("workload") for line in file.lines(("workload",))}
    matches = (pattern.fullmatch(name) for name in names)
    found = [Workload(path=path, name=one[0], models=int(one[1]), rate=one[2]) for one in matches if one]
    return sorted(found, key=lambda one: (one.models, float(one.rate)))


def merged(first: Workload, second: Workload, folder: Path) -> Workload:
    """Two workloads of one file as one, the models of the second after those of the first; written to `folder`.

    Raises:
        forecasts.importers.lines.DemandFileError: the file cannot be read.
    """
    assert first.path == second.path
    shifts = {first.name: 0, second.name: first.models}
    models = first.models + second.models
    name = f"synth-{models}-{first.rate}-1.0-1.0"
    columns = ("workload", "request_time", "model_name", "input_len", "output_len")
    rows = []
    with open_csv(first.path) as file:
        for line in file.lines(columns):
            if line.word("workload") in shifts:
                model = int(line.word("model_name").rpartition("_")[2]) + shifts[line.word("workload")]
                rest = [line.word("input_len"), line.word("output_len")]
                rows.append([line.word("request_time"), f"synth_model_{model:02d}", *rest])
    path = folder / f"{name}.csv"
    lines = [",".join(columns), *(",".join([name, *row]) for row in sorted(rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Workload(path=path, name=name, models=models, rate=first.rate)


def measure(setup: Setup, workload: Workload) -> Row:
    """Serve a workload to its end."""
    outcome = simulate(scenario_of(setup, workload))
    result = outcome.result
    return Row(
        system=setup.system,
        models=workload.models,
        rate=workload.rate,
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
