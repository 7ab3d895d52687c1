"""From a scenario to a result: build the world, run it, and sum it up."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controlplane.policies.admission import AdmissionSettings
from controlplane.policies.demand import serving_model
from controlplane.policies.facts import Endpoint
from controlplane.policies.rerouting import ReroutingSettings
from controlplane.policies.routing import RoutingSettings
from dataplane.protocol.tiers import Objective
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from forecasts.importers.lines import DemandFileError
from ops.simulator.kernel.events import Events
from ops.simulator.kernel.requests import Request
from ops.simulator.results.results import Result
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.means import load_profiles, means_of
from ops.simulator.scenario.scenario import Scenario, ScenarioError
from ops.simulator.servers.pool_log import PoolLog
from ops.simulator.traffic.traffic_parts import AegaeonPart
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.operations import operate
from ops.simulator.world.routing import Router
from ops.simulator.world.serving import fixed_servers
from ops.simulator.world.summary import result_of
from ops.simulator.world.usage import Use
from ops.simulator.world.world import World, WorldSettings

Report = Callable[[float, int], None]
"""Called with the simulated time and the number of requests so far."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The world at its end, its fleet if it was scaled, and the result of both."""

    world: World
    fleet: Fleet | None
    result: Result


def simulate(
    scenario: Scenario,
    *,
    seed: int | None = None,
    report: Report = lambda now_s, requests: None,
    router: Router | None = None,
    traffic: Iterable[Request] | None = None,
    log: PoolLog | None = None,
) -> Outcome:
    """Run a scenario to its end. `router`: in place of the live policy. `traffic`: in place of the scenario's, in order
    of arrival. `log`: takes what the slots of pools do, in scenarios without scaling.

    Raises:
        ScenarioError: the instances of the beginning find no room, no instance can be of the
            recording's models, or GPU types do not go together.
        ProfileError: a GPU profile cannot be used.
        forecasts.importers.lines.DemandFileError: the recording cannot be used.
    """
    seed = scenario.seed if seed is None else seed
    began_s = time.perf_counter()
    world, fleet, prices = build_world(scenario, seed, router, traffic, log)
    for now_s in world.run():
        report(now_s, world.arrived)
    result = result_of(
        world,
        fleet,
        scenario=scenario.name,
        seed=seed,
        strategy=None if scenario.scaling is None else scenario.scaling.strategy,
        seconds=time.perf_counter() - began_s,
        prices=prices,
    )
    return Outcome(world=world, fleet=fleet, result=result)


def build_world(
    scenario: Scenario,
    seed: int,
    router: Router | None = None,
    given: Iterable[Request] | None = None,
    log: PoolLog | None = None,
) -> tuple[World, Fleet | None, Mapping[str, float]]:
    """The world of a scenario at its beginning, its fleet if it is scaled, and the price of a GPU hour by GPU type."""
    traffic = traffic_of(scenario, seed) if given is None else iter(given)
    if bases := scenario.served_bases:
        traffic = (replace(request, model=serving_model(request.model, bases)) for request in traffic)
        scenario = scenario.model_copy(update={"models": [one for one in scenario.models if not one.with_base]})
    models = {model.name: model for model in scenario.models}
    if not scenario.policy.prefix_cache or scenario.fleet.serving in ("pooled", "static"):
        traffic = (replace(request, blocks=()) if request.blocks else request for request in traffic)
    if isinstance(scenario.traffic, AegaeonPart):
        if scenario.fleet.serving == "dedicated":
            raise ScenarioError(
                f"{scenario.name}: traffic.kind: models of aegaeon need fleet.serving other than dedicated"
            )
        requests = list(traffic)  # some thousands at most
        models = {
            name: scenario.models[number_of(name) % len(scenario.models)]
            for name in sorted({request.model for request in requests})
        }
        traffic = iter(requests)
    profiles = load_profiles(scenario.fleet)
    means = means_of(scenario, models, profiles)
    prices = {gpu_type: one.profile.cost_per_hour for gpu_type, one in means.items()}
    endpoints = [Endpoint(model=model, region=region) for model in models for region in scenario.regions]
    world = World(_world_settings(scenario), Events(), traffic, endpoints, router)
    for model in scenario.models:
        if model.base is not None:
            world.answers[model.name] = world.answers[model.base]  # its node, too, expects the same of both
    if scenario.scaling is not None:
        return world, operate(scenario, scenario.scaling, means, profiles, world, seed), prices
    [own] = means.values()
    gpus = int(scenario.fleet.serving == "dedicated")  # else all instances share their server's
    for server in fixed_servers(scenario, models, own, world, log):
        world.present.place(server)
        for report in server.reports():
            world.usage.change(None, Use(report.endpoint, "serving", report.kind, report.gpu_type, gpus), 0.0)
    return world, None, prices


def number_of(model: str) -> int:
    """The number at the end of a recorded model's name.

    Raises:
        DemandFileError: there is none.
    """
    digits = model.rpartition("_")[2]
    if not digits.isdecimal():
        raise DemandFileError(f"model {model!r}: must end with _ and a number")
    return int(digits)


def _world_settings(scenario: Scenario) -> WorldSettings:
    own = {tier: Objective(ttft_s=one.ttft_s, tbt_s=one.tbt_s) for tier, one in scenario.targets.items()}
    policy = scenario.policy
    routing = RoutingSettings(utilization_max=policy.region_utilization_max, timely_share=policy.timely_share)
    return WorldSettings(
        regions=tuple(scenario.regions),
        latencies_ms={_pair(scenario.ends(key)): value for key, value in scenario.latencies_ms.items()},
        targets=TIER_OBJECTIVES | own,
        view_s=scenario.policy.view_s,
        learn_s=scenario.planning.learn_s,
        routing=routing,
        rerouting=ReroutingSettings() if scenario.policy.rerouting else None,
        admission=AdmissionSettings(routing=routing) if scenario.policy.admission else None,
        tries_max=scenario.policy.tries_max,
        gateways=scenario.policy.gateways,
        clairvoyant=scenario.policy.clairvoyant,
    )


def _pair(ends: tuple[str, ...]) -> tuple[str, str]:
    return ends[0], ends[1]
