"""Build the fleet of a scenario with [scaling]: nodes, planner, loops, failures."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace

from controlplane.policies.assignment.facts import SlotAdd, SlotSettings
from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.fit import AdapterSize, ModelSize
from controlplane.policies.placement.facts import PlacementSettings, Profile
from controlplane.policies.planned_layouts import PlannedLayoutSettings
from controlplane.policies.profile_correction import CorrectionSettings
from controlplane.policies.scaling.facts import ScaleStep
from dataplane.scheduling.profile import GpuProfile
from forecasts.settings import ForecastSettings
from ops.simulator.kernel.scenario_values import by_gpu_type
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.means import Means
from ops.simulator.scenario.planning import ProvisioningPart, ScalingPart
from ops.simulator.scenario.scenario import ModelPart, Scenario, ScenarioError
from ops.simulator.servers.pool_slot import PoolSlot
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.traffic.demand import Demand
from ops.simulator.world.failures import Failure, Failures
from ops.simulator.world.fleet import Fleet, MakeServer
from ops.simulator.world.fleet_layouts import FleetLayouts
from ops.simulator.world.fleet_pools import FleetPools
from ops.simulator.world.hosted import FleetNode
from ops.simulator.world.loops import Loops, LoopSettings
from ops.simulator.world.planning import Planner, PlanSettings
from ops.simulator.world.serving import replay_settings, spec_of
from ops.simulator.world.spot_starts import SpotStarts, SpotStartTimes
from ops.simulator.world.world import World

PLANNED = {"lt-i", "lt-u", "lt-ua", "lt-d", "oracle"}
"""Strategies that follow a plan."""


def operate(
    scenario: Scenario,
    scaling: ScalingPart,
    means: Mapping[str, Means],
    profiles: Mapping[str, GpuProfile],
    world: World,
    seed: int,
) -> Fleet:
    """Fill the world with a fleet that loops operate from the end of learning on. `means`: by GPU type; `profiles`:
    by path.

    Raises:
        ScenarioError: the fleet has too few GPUs for its first instances, a model's keys name different GPU types, or
            no model can be pooled.
    """
    begins_s = scenario.planning.learn_s
    nodes = list(_nodes(scenario, profiles, means))
    everywhere = {one.name: scenario.regions for one in scenario.models} | scenario.provisioning.weights
    fleet = Fleet(
        nodes,
        _maker(means, world),
        world,
        world.events,
        times=scenario.provisioning.times(),
        spot_starts=SpotStarts(_spot_times(scenario.provisioning), seed),
        weights=(Endpoint(model=model, region=region) for model, places in everywhere.items() for region in places),
        pools=_pools(scenario, means, world),
        layouts=FleetLayouts(nodes, scenario.planning.layout_patience_s),
    )
    plan = _plan_settings(scenario, scaling, means)
    planner = None
    if scaling.strategy in PLANNED:
        truth = Demand.of(traffic_of(scenario, seed)) if scaling.strategy == "oracle" else None
        planner = Planner(plan, world.demand, truth, begins_s=begins_s)
    settings = LoopSettings(
        scaling=scaling.settings(),
        slots=SlotSettings(donation_enabled=scaling.spot, donation_max_age_s=scaling.spot_max_age_s),
        every_s=scaling.every_s,
    )
    loops = Loops(world, fleet, planner, settings, plan)
    first = list(_first_steps(scenario, plan.profiles))
    try:
        loops.begin_with(first)
    except ValueError as error:
        raise ScenarioError(f"{scenario.name}: {error}") from error
    loops.begin(begins_s)
    Failures(world, fleet, seed).begin(_failures(scenario, nodes), begins_s)
    return fleet


def _nodes(scenario: Scenario, profiles: Mapping[str, GpuProfile], means: Mapping[str, Means]) -> Iterator[FleetNode]:
    """The nodes; those of reserves tell their memory for weights."""
    numbers = dict.fromkeys(scenario.regions, 0)
    for part in scenario.fleet.nodes:
        gpu_type = profiles[part.profile or scenario.fleet.profile].gpu_type
        for _ in range(part.count):
            name = f"{part.region}-{numbers[part.region]}"
            numbers[part.region] += 1
            yield FleetNode(
                name=name,
                region=part.region,
                gpu_type=gpu_type,
                layout=part.layout or (part.gpus,) * part.slots,
                regroups=part.layout is not None and part.regroups and scenario.planning.layouts,
                host_bytes=part.host_bytes,
                weights_bytes=means[gpu_type].weights_bytes if scenario.planning.reserve else None,
            )


def _spot_times(part: ProvisioningPart) -> SpotStartTimes:
    return SpotStartTimes(median_s=part.spot_same_s, spread=part.spot_same_spread, most_s=part.spot_same_most_s)


def _maker(means: Mapping[str, Means], world: World) -> MakeServer:
    def make(add: SlotAdd, name: str) -> DedicatedServer:
        mine = means[add.gpu_type]
        return DedicatedServer(
            name,
            add.endpoint.region,
            mine.costs[add.endpoint.model],
            replace(mine.instance, kv_bytes=mine.instance.kv_bytes * add.gpus),
            gpu_type=add.gpu_type,
            events=world.events,
            answers=world.answers[add.endpoint.model],
            ended=world.ended,
            node_id=add.node_id,
            slot=add.slot,
        )

    return make


def _pools(scenario: Scenario, means: Mapping[str, Means], world: World) -> FleetPools:
    def make(add: SlotAdd, gpus: int) -> PoolSlot:
        return PoolSlot(
            add.node_id,
            add.slot,
            add.endpoint.region,
            replay_settings(scenario, means[add.gpu_type], gpus),
            gpus=gpus,
            events=world.events,
            answers=world.answers,
            ended=world.ended,
        )

    return FleetPools(make, {one.name: spec_of(one.name, one, scenario) for one in scenario.models}, world)


def _latencies(
    scenario: Scenario, profiles: Mapping[ModelGpu, Profile], means: Mapping[str, Means]
) -> dict[ModelGpu, dict[str, float]]:
    """Latencies of the models that may be pooled: those that fit in a slot's memory for weights."""
    if not scenario.planning.shares_gpus:
        return {}
    found = {}
    for key, profile in profiles.items():
        mine = means[key.gpu_type]
        assert mine.weights_bytes is not None, "a scenario with pools has it"
        costs = mine.costs[key.model]
        if costs.weights_bytes <= mine.weights_bytes * profile.gpus:
            found[key] = asdict(costs.latency) | {"switch_s": costs.weights_bytes / costs.bytes_per_s}
    if not found:
        raise ScenarioError(f"{scenario.name}: fleet.weights_bytes: no model fits into what the slot of a pool has")
    return found


def _plan_settings(scenario: Scenario, scaling: ScalingPart, means: Mapping[str, Means]) -> PlanSettings:
    planning = scenario.planning
    profiles = _profiles(scenario, means)
    limits = scaling.instances_min, scaling.instances_max
    return PlanSettings(
        regions=tuple(scenario.regions),
        profiles=profiles,
        latencies=_latencies(scenario, profiles, means),
        sizes={model.name: _size_of(model, scenario) for model in scenario.models},
        gpu_cost_per_hour={gpu_type: one.profile.cost_per_hour for gpu_type, one in means.items()},
        limits={
            Endpoint(model=one.name, region=region): limits for one in scenario.models for region in scenario.regions
        },
        forecast=ForecastSettings(
            quantile=planning.quantile, forecasters=planning.forecasters, origins_max=planning.origins_max
        ),
        placement=PlacementSettings(epsilon=planning.epsilon),
        niw_share=planning.niw_share,
        pools=planning.poolable(),
        correction=CorrectionSettings() if planning.correct_profiles else None,
        reserve=planning.sharing(),
        layouts=PlannedLayoutSettings(enabled=planning.layouts, hold_s=planning.layout_hold_s),
    )


def _size_of(model: ModelPart, scenario: Scenario) -> ModelSize:
    adapter = None if model.base is None else AdapterSize(base=model.base, weights_bytes=model.weights_bytes)
    return ModelSize(weights_bytes=scenario.checkpoint_of(model).weights_bytes, adapter=adapter)


def _profiles(scenario: Scenario, gpu_types: Iterable[str]) -> dict[ModelGpu, Profile]:
    """The GPU types of each model, and what an instance serves there."""
    found: dict[ModelGpu, Profile] = {}
    for index, model in enumerate(scenario.models):
        assert model.tokens_per_s is not None, "a scenario that is scaled has it"
        rates = by_gpu_type(model.tokens_per_s, gpu_types)
        gpus = by_gpu_type(model.gpus, rates)
        if rates.keys() != gpus.keys():
            key, names = f"models.{index}.gpus", ", ".join(sorted(rates))
            raise ScenarioError(f"{scenario.name}: {key}: must name the GPU types of tokens_per_s: {names}")
        for gpu_type, tokens_per_s in rates.items():
            found[ModelGpu(model=model.name, gpu_type=gpu_type)] = Profile(
                tokens_per_s=tokens_per_s, gpus=gpus[gpu_type], start=scenario.provisioning.times()
            )
    return found


def _first_steps(scenario: Scenario, profiles: Collection[ModelGpu]) -> Iterator[ScaleStep]:
    for index, part in enumerate(scenario.fleet.instances):
        endpoint, gpu_type = Endpoint(model=part.model, region=part.region), part.gpu_type
        if gpu_type is not None and ModelGpu(model=part.model, gpu_type=gpu_type) not in profiles:
            raise ScenarioError(
                f"{scenario.name}: fleet.instances.{index}.gpu_type: tokens_per_s of {part.model} names no {gpu_type}"
            )
        yield ScaleStep(endpoint=endpoint, gpu_type=gpu_type, delta=part.count, reason="there at first", kind=part.kind)


def _failures(scenario: Scenario, nodes: list[FleetNode]) -> Iterator[Failure]:
    for index, part in enumerate(scenario.failures):
        names = [node.name for node in nodes if node.region == part.region]
        if part.node is not None:
            if part.node >= len(names):
                raise ScenarioError(f"{scenario.name}: failures.{index}.node: {part.region} has {len(names)} nodes")
            names = [names[part.node]]
        if part.at_s is not None and part.at_s < scenario.planning.learn_s:
            raise ScenarioError(
                f"{scenario.name}: failures.{index}.at_s: {part.at_s:g} is before planning.learn_s,"
                f" {scenario.planning.learn_s:g}: nothing is served yet"
            )
        yield Failure(
            nodes=tuple(names),
            down_s=part.down_s,
            noticed_s=part.noticed_s,
            at_s=part.at_s,
            rate_per_day=part.rate_per_day or 0.0,
        )
