"""The testbed of Aegaeon's evaluation in the simulator: what serves a workload of its artifact, and how well.

16 GPUs, models of 7B to 13B. Token k is due 10 s + k * 0.1 s after its request arrived. Step times: the artifact's H100
profiles, where a switch takes bytes / 16 GB/s, as its simulator assumes; or any other profile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dataplane.scheduling.deadlines import TimeSlices
from ops.bench.papers.workloads import Workload
from ops.simulator.run import number_of, simulate
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
HOST_BYTES = 2 * 10**12
"""Of each node of the testbed; two have eight GPUs each."""
GPU_BYTES = 76 * 10**9
"""Of 80 GiB; the rest is the engine's."""

System = Literal[
    "pooled",
    "pooled-both",
    "pooled-deadlines",
    "pooled-both-deadlines",
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


def size_of(model: str) -> str:
    """The size of a workload's model by its name: 7B, 9B or 13B."""
    return MODELS[number_of(model) % len(MODELS)].name.partition("-")[0]


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


def _both(_: int) -> Mapping[str, Any]:
    return {"both_slots": GPUS}


def _gpus(_: int) -> Mapping[str, Any]:
    return {"gpus": GPUS}


_IN_ROUNDS: Mapping[str, TimeSlices] = {"time_slices": "rounds"}
_BY_DEADLINES: Mapping[str, TimeSlices] = {"time_slices": "deadlines"}

SYSTEMS: Mapping[System, SystemPlan] = {
    "pooled": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_split, policy=_IN_ROUNDS),
    "pooled-both": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_both, policy=_IN_ROUNDS),
    "pooled-deadlines": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_split, policy=_BY_DEADLINES),
    "pooled-both-deadlines": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_both, policy=_BY_DEADLINES),
    "request-level": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_gpus),
    "request-level-prefetch": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_gpus),
    "request-level-sjf": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_gpus, policy={"switching": "shortest-first"}),
    "request-level-per-gpu": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_gpus, policy={"switching": "line-per-gpu"}),
    "request-level-split": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=_split),
    "static": SystemPlan(weights_bytes=TWO_MODELS_BYTES, fleet=_gpus),
    "dedicated": SystemPlan(weights_bytes=LARGEST_BYTES, fleet=lambda _: {"gpus": GPUS, "models_per_gpu": 1}),
}
"""Tidepool's shared pools with disaggregated and with aggregated prefill and decode, in rounds of quotas, as the
paper has them; both with time slices by deadlines; request-level switching (ServerlessLLM) with a global queue, that
with the next model prefetched into the memory that the pools have, with the shortest job first (ServerlessLLM+), with
per-GPU queues as in the artifact, and disaggregated with a global queue; two models on each GPU for good (MuxServe); a
GPU for each model.
"""
POOLS: tuple[System, ...] = ("pooled", "pooled-both", "pooled-deadlines", "pooled-both-deadlines")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What serves a workload. `slo_scale`: of both targets (Figure 13). `nodes`: those that the slots of a pool are on,
    each with `HOST_BYTES`; 0: one pool without a limit of host memory. `policy`: other than the defaults.
    """

    system: System = "pooled"
    profile: Path = ARTIFACT_PROFILE
    prefill_slots: int = 6
    slo_scale: float = 1.0
    nodes: int = 0
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of a workload. `models` at `rate` requests per second each, with lengths scaled; `draw`: 0 for the file's
    own; `unserved`: requests too long for a GPU.
    """

    system: System
    models: int
    rate: str
    scale_inputs: float
    scale_outputs: float
    draw: int
    slo_scale: float
    prefill_slots: int
    nodes: int
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
        traffic=AegaeonPart(
            kind="aegaeon",
            path=workload.path,
            workload=workload.name,
            scale_inputs=workload.scale_inputs,
            scale_outputs=workload.scale_outputs,
        ),
        models=MODELS,
        fleet=FleetPart.model_validate(
            {
                "serving": "request-level" if serving == "request" else serving,
                "profile": str(setup.profile),
                "kv_bytes": GPU_BYTES - plan.weights_bytes,
                "weights_bytes": plan.weights_bytes,
                **plan.fleet(setup.prefill_slots),
                **({"pool_nodes": setup.nodes, "host_bytes": HOST_BYTES} if setup.nodes else {}),
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
        scale_inputs=workload.scale_inputs,
        scale_outputs=workload.scale_outputs,
        draw=draw,
        slo_scale=setup.slo_scale,
        prefill_slots=setup.prefill_slots,
        nodes=setup.nodes,
        requests=result.requests,
        unserved=sum(result.failures.values()),
        service_attainment=result.service_attainment,
        token_attainment=result.token_attainment,
        switches=sum(server.switches for server in outcome.world.present.servers),
        busy_share=result.busy_share,
        seconds=result.seconds,
        event_log_hash=result.event_log_hash,
    )
