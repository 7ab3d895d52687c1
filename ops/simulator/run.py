"""From a scenario to a report: build the world, run it, and say what came of it."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from controlplane.policies.routing import RoutingSettings
from dataplane.dispatch import Dispatcher
from dataplane.engines.replay import ReplaySettings
from dataplane.messages import ModelSpec
from dataplane.profile import GpuProfile, load_gpu_profile
from dataplane.settings import SlotKind
from dataplane.turns.decode import DecodeSettings
from dataplane.turns.prefill import PrefillSettings
from dataplane.turns.schedule import TurnSettings
from dataplane.turns.tiers import TIER_TARGETS
from forecasts.importers.lines import DemandFileError
from ops.simulator.costs import InstanceSettings, ModelCosts
from ops.simulator.dedicated import Instance
from ops.simulator.events import Events
from ops.simulator.measures import Histogram, Tally
from ops.simulator.pool import JoiningDispatcher, PoolServer
from ops.simulator.request_level import RequestLevelCluster, SplitCluster
from ops.simulator.requests import Request, Served, Target
from ops.simulator.scenario import AegaeonPart, AzurePart, FleetPart, ModelPart, Scenario
from ops.simulator.servers import DedicatedServer
from ops.simulator.traces import read_aegaeon, read_azure
from ops.simulator.traffic import Burst, Generated, Lengths, generate, zipf
from ops.simulator.world import Server, World, WorldSettings

Told = Callable[[float, int], None]
"""Called with the simulated time and the requests that came so far."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`seconds`: how long the simulation took, by the wall clock; it is the only field that two runs differ in."""

    scenario: Scenario
    seed: int
    world: World
    simulated_s: float
    seconds: float

    def document(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        world, slots = self.world, sum(server.slots for server in self.world.servers)
        busy_s = sum(server.busy_s for server in world.servers)
        return {
            "scenario": self.scenario.name,
            "seed": self.seed,
            "event_log_hash": world.log.digest,
            "events": world.events.count,
            "requests": world.arrived,
            "failures": dict(sorted(world.failures.items())),
            "simulated_s": self.simulated_s,
            "seconds": self.seconds,
            "requests_per_s": world.arrived / self.seconds if self.seconds else 0.0,
            "requests_in_system_mean": world.request_seconds / self.simulated_s if self.simulated_s else 0.0,
            "slots": slots,
            "slot_hours": slots * self.simulated_s / 3600,
            "busy_share": busy_s / (slots * self.simulated_s) if self.simulated_s else 0.0,
            "switches": sum(server.switches for server in world.servers),
            "service_attainment": attainment(world)[0],
            "token_attainment": attainment(world)[1],
            "rows": [
                {"model": model, "tier": tier, **_row(tally)} for (model, tier), tally in sorted(world.tallies.items())
            ],
        }


def attainment(world: World) -> tuple[float, float]:
    """Of all requests: by service and by token; 1 without any."""
    tallies = world.tallies.values()
    requests, tokens = sum(tally.requests for tally in tallies), sum(tally.tokens for tally in tallies)
    service = sum(tally.share_sum for tally in tallies) / requests if requests else 1.0
    return service, sum(tally.tokens_in_time for tally in tallies) / tokens if tokens else 1.0


def simulate(scenario: Scenario, *, seed: int | None = None, told: Told = lambda now_s, requests: None) -> Outcome:
    """Run a scenario to its end.

    Raises:
        dataplane.profile.ProfileError: the GPU profile cannot be used.
        forecasts.importers.lines.DemandFileError: the recording cannot be used.
    """
    seed = scenario.seed if seed is None else seed
    began_s = time.perf_counter()
    world = build_world(scenario, seed)
    for now_s in world.run():
        told(now_s, world.arrived)
    return Outcome(
        scenario=scenario,
        seed=seed,
        world=world,
        simulated_s=world.events.now_s,
        seconds=time.perf_counter() - began_s,
    )


def build_world(scenario: Scenario, seed: int) -> World:
    """The world of a scenario, at its beginning."""
    defaults = {tier: Target(ttft_s=one.ttft_s, tbt_s=one.tbt_s) for tier, one in TIER_TARGETS.items()}
    own = {tier: Target(ttft_s=one.ttft_s, tbt_s=one.tbt_s) for tier, one in scenario.targets.items()}
    settings = WorldSettings(
        regions=tuple(scenario.regions),
        latencies_ms={_pair(scenario.ends(key)): value for key, value in scenario.latencies_ms.items()},
        targets=defaults | own,
        routing=RoutingSettings(utilization_max=scenario.policy.region_utilization_max),
    )
    models = {model.name: model for model in scenario.models}
    if isinstance(scenario.traffic, AegaeonPart):
        recorded = sorted({request.model for request in traffic_of(scenario, seed)})
        models = {name: scenario.models[number_of(name) % len(scenario.models)] for name in recorded}
    world = World(settings, Events(), traffic_of(scenario, seed))
    for server in _servers(scenario, models, world):
        world.place(server)
    return world


def number_of(model: str) -> int:
    """The number at the end of a recorded model's name.

    Raises:
        DemandFileError: there is none.
    """
    digits = model.rpartition("_")[2]
    if not digits.isdecimal():
        raise DemandFileError(f"model {model!r}: must end with _ and a number")
    return int(digits)


def _pair(ends: tuple[str, ...]) -> tuple[str, str]:
    return ends[0], ends[1]


def traffic_of(scenario: Scenario, seed: int) -> Iterator[Request]:
    """The requests of a scenario, in order."""
    traffic = scenario.traffic
    if isinstance(traffic, AegaeonPart):
        return read_aegaeon(traffic.path, traffic.workload, origin=traffic.origin, tier=traffic.tier)
    if isinstance(traffic, AzurePart):
        return read_azure(traffic.path, model=traffic.model, origin=traffic.origin, tier=traffic.tier)
    return generate(
        Generated(
            rate_per_s=traffic.rate_per_s,
            duration_s=traffic.duration_s,
            models=zipf([model.name for model in scenario.models], traffic.zipf),
            origins=traffic.origins,
            tiers=traffic.tiers,
            prompt=Lengths(**traffic.prompt_tokens.model_dump()),
            output=Lengths(**traffic.output_tokens.model_dump()),
            cv=traffic.cv,
            day_swing=traffic.day_swing,
            peak_hour=traffic.peak_hour,
            bursts=tuple(Burst(**burst.model_dump()) for burst in traffic.bursts),
        ),
        seed,
    )


def _servers(scenario: Scenario, models: dict[str, ModelPart], world: World) -> Iterator[Server]:
    fleet, policy = scenario.fleet, scenario.policy
    profile = load_gpu_profile(fleet.profile)
    turns = TurnSettings(
        prefill=PrefillSettings(order=policy.order, group_requests_max=policy.group_requests_max),
        decode=DecodeSettings(quota_max_s=policy.quota_max_s),
    )
    costs = {name: model_costs(name, model, profile) for name, model in models.items()}
    instance = InstanceSettings(
        kv_bytes=fleet.kv_bytes,
        batch_max=policy.batch_max,
        prefill_tokens_per_step_max=policy.prefill_tokens_per_step_max,
        batching=policy.batching,
        turns=turns,
    )
    if fleet.serving == "dedicated":
        for part in fleet.instances:
            for number in range(part.count):
                yield DedicatedServer(
                    f"{part.region}/{part.model}/{part.kind}/{number}",
                    part.region,
                    Instance(costs[part.model], instance, world.events, world.ended),
                    profile.gpu_type,
                    part.kind,
                )
        return
    for region in scenario.regions:
        if fleet.serving == "request-level":
            yield _request_level(region, fleet, costs, instance, profile.gpu_type, world)
        else:
            assert fleet.weights_bytes is not None
            kinds: list[SlotKind] = ["prefill"] * fleet.prefill_slots
            kinds += ["decode"] * fleet.decode_slots
            kinds += ["both"] * fleet.both_slots
            replay = ReplaySettings(
                profile=profile,
                weights_bytes=fleet.weights_bytes,
                kv_bytes=fleet.kv_bytes,
                batch_max=policy.batch_max,
                prefill_tokens_per_step_max=policy.prefill_tokens_per_step_max,
                prefetch=policy.prefetch,
                turns=turns,
            )
            specs = [_spec(name, model) for name, model in models.items()]
            yield PoolServer(
                f"{region}/pool",
                region,
                kinds,
                specs,
                replay,
                events=world.events,
                ended=world.ended,
                dispatcher=JoiningDispatcher if policy.decode_slot == "join" else Dispatcher,
            )


def _request_level(
    region: str,
    fleet: FleetPart,
    costs: Mapping[str, ModelCosts],
    settings: InstanceSettings,
    gpu_type: str,
    world: World,
) -> Server:
    def cluster(name: str, gpus: int, ended: Callable[[Served], None], *, hands_over: bool) -> RequestLevelCluster:
        return RequestLevelCluster(
            f"{region}/{name}",
            region,
            gpus,
            costs,
            replace(settings, hands_over=hands_over),
            gpu_type=gpu_type,
            events=world.events,
            ended=ended,
        )

    if fleet.gpus:
        return cluster("gpus", fleet.gpus, world.ended, hands_over=False)
    decode = cluster("decode", fleet.decode_slots, world.ended, hands_over=False)

    def prefilled(served: Served) -> None:
        if served.left:
            decode.submit(served)
        else:
            world.ended(served)

    return SplitCluster(cluster("prefill", fleet.prefill_slots, prefilled, hands_over=True), decode)


def model_costs(name: str, model: ModelPart, profile: GpuProfile) -> ModelCosts:
    """What a model costs on a GPU type."""
    return ModelCosts(
        name=name,
        latency=profile.nearest_model(model.weights_bytes).latency,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        bytes_per_s=profile.pcie_bytes_per_s * profile.transfer_efficiency,
    )


def _spec(name: str, model: ModelPart) -> ModelSpec:
    return ModelSpec(
        name=name,
        path="-",
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        context_tokens=model.context_tokens,
    )


def _row(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "failed": tally.failed,
        "service_attainment": tally.service_attainment,
        "token_attainment": tally.token_attainment,
        "ttft_violations": tally.ttft_violations / tally.ended if tally.ended else 0.0,
        "input_tokens": tally.input_tokens,
        "output_tokens": tally.tokens,
        "ttft_s": _quantiles(tally.ttft),
        "tbt_mean_s": _quantiles(tally.token_gap),
        "service_s": _quantiles(tally.service),
    }


def _quantiles(histogram: Histogram) -> dict[str, float] | None:
    if not histogram.count:
        return None
    return {f"p{round(100 * share)}": histogram.quantile(share) for share in (0.5, 0.95, 0.99)}
