"""From a scenario with [scaling] to a fleet that is operated: nodes, planner, loops, failures."""

from collections.abc import Iterator, Mapping

from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.placement.facts import PlacementSettings, Profile
from controlplane.policies.scaling.facts import ScaleStep
from controlplane.policies.slots.facts import SlotAdd, SlotSettings
from forecasts.settings import ForecastSettings
from ops.simulator.demand import Demand
from ops.simulator.failures import Failure, Failures
from ops.simulator.fleet import Fleet, FleetNode, MakeServer
from ops.simulator.formats import traffic_of
from ops.simulator.loops import Loops, LoopSettings
from ops.simulator.planning import Planner, PlanSettings
from ops.simulator.scenario import Scenario, ScenarioError
from ops.simulator.scenario_planning import ScalingPart
from ops.simulator.servers import DedicatedServer
from ops.simulator.serving import Means
from ops.simulator.world import World

PLANNED = {"lt-i", "lt-u", "lt-ua", "lt-d", "oracle"}
"""Strategies that follow a plan."""


def operate(scenario: Scenario, scaling: ScalingPart, means: Means, world: World, seed: int) -> Fleet:
    """Fill the world with a fleet, and let it be operated from where learning ends.

    Raises:
        ScenarioError: the instances of the beginning find no room.
    """
    begins_s = scenario.planning.learn_s
    nodes = list(_nodes(scenario, means.profile.gpu_type))
    everywhere = {name: list(scenario.regions) for name in means.costs} | scenario.provisioning.weights
    fleet = Fleet(
        nodes,
        _maker(means, world),
        world,
        world.events,
        times=scenario.provisioning.times(),
        weights=(Endpoint(model=model, region=region) for model, places in everywhere.items() for region in places),
    )
    plan = _plan_settings(scenario, scaling, means)
    planner = None
    if scaling.strategy in PLANNED:
        truth = Demand.of(traffic_of(scenario, seed)) if scaling.strategy == "oracle" else None
        planner = Planner(plan, world.demand, truth, begins_s=begins_s)
    settings = LoopSettings(
        scaling=scaling.settings(),
        slots=SlotSettings(spot_enabled=scaling.spot, spot_max_age_s=scaling.spot_max_age_s),
        every_s=scaling.every_s,
    )
    loops = Loops(world, fleet, planner, settings, plan)
    try:
        loops.begin_with(_first_steps(scenario))
    except ValueError as error:
        raise ScenarioError(f"{scenario.name}: {error}") from error
    loops.begin(begins_s)
    Failures(world, fleet, seed).begin(_failures(scenario, nodes), begins_s)
    return fleet


def _nodes(scenario: Scenario, gpu_type: str) -> Iterator[FleetNode]:
    numbers = dict.fromkeys(scenario.regions, 0)
    for part in scenario.fleet.nodes:
        for _ in range(part.count):
            name = f"{part.region}-{numbers[part.region]}"
            numbers[part.region] += 1
            yield FleetNode(name=name, region=part.region, gpu_type=gpu_type, slots=part.slots, gpus=part.gpus)


def _maker(means: Means, world: World) -> MakeServer:
    def make(add: SlotAdd, name: str) -> DedicatedServer:
        return DedicatedServer(
            name,
            add.endpoint.region,
            means.costs[add.endpoint.model],
            means.instance,
            gpu_type=add.gpu_type,
            events=world.events,
            ended=world.ended,
            node_id=add.node_id,
            slot=add.slot,
        )

    return make


def _plan_settings(scenario: Scenario, scaling: ScalingPart, means: Means) -> PlanSettings:
    planning, gpu_type = scenario.planning, means.profile.gpu_type
    profiles: Mapping[ModelGpu, Profile] = {
        ModelGpu(model=model.name, gpu_type=gpu_type): Profile(
            tokens_per_s=model.tokens_per_s or 0.0, gpus=model.gpus, start=scenario.provisioning.times()
        )
        for model in scenario.models
    }
    limits = scaling.instances_min, scaling.instances_max
    return PlanSettings(
        regions=tuple(scenario.regions),
        profiles=profiles,
        gpu_cost_per_hour={gpu_type: means.profile.cost_per_hour},
        limits={
            Endpoint(model=one.name, region=region): limits for one in scenario.models for region in scenario.regions
        },
        forecast=ForecastSettings(
            quantile=planning.quantile, forecasters=planning.forecasters, origins_max=planning.origins_max
        ),
        placement=PlacementSettings(epsilon=planning.epsilon),
        niw_share=planning.niw_share,
    )


def _first_steps(scenario: Scenario) -> Iterator[ScaleStep]:
    for part in scenario.fleet.instances:
        endpoint = Endpoint(model=part.model, region=part.region)
        yield ScaleStep(endpoint=endpoint, gpu_type=None, delta=part.count, reason="there at first", kind=part.kind)


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
