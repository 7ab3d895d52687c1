"""What serves in a scenario from its beginning to its end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from controlplane.policies.assignment.layouts import LayoutSettings
from controlplane.policies.facts import RegionGpu
from dataplane.dispatch.worker import WorkerKind
from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.messages import BaseModel, ModelSpec
from dataplane.protocol.tiers import Tier
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.requests import Served
from ops.simulator.scenario.means import Means
from ops.simulator.scenario.scenario import FleetPart, ModelPart, Scenario, ScenarioError
from ops.simulator.servers.multiplexed import multiplexed_gpus
from ops.simulator.servers.pool import PoolServer
from ops.simulator.servers.pool_log import PoolLog
from ops.simulator.servers.request_level import RequestLevelCluster, SplitCluster
from ops.simulator.servers.servers import DedicatedServer
from ops.simulator.traffic.presence import Server
from ops.simulator.world.regrouping import Regrouper, RegroupSettings, opened_slots
from ops.simulator.world.world import World


def fixed_servers(
    scenario: Scenario, models: Mapping[str, ModelPart], means: Means, world: World, log: PoolLog | None = None
) -> Iterator[Server]:
    """The servers of a scenario without scaling. `log`: of what pools do."""
    fleet = scenario.fleet
    profile, costs, instance = means.profile, means.costs, means.instance
    if fleet.serving == "dedicated":
        for part in fleet.instances:
            for number in range(part.count):
                server = DedicatedServer(
                    f"{part.region}/{part.model}/{part.kind}/{number}",
                    part.region,
                    costs[part.model],
                    instance,
                    gpu_type=profile.gpu_type,
                    events=world.events,
                    answers=world.answers[part.model],
                    ended=world.ended,
                )
                server.open(part.kind)
                yield server
        return
    for region in scenario.regions:
        if fleet.serving == "request-level":
            yield _request_level(scenario, region, costs, instance, profile.gpu_type, world)
        else:
            replay = replay_settings(scenario, means)
            specs = [spec_of(name, model, scenario) for name, model in models.items()]
            if fleet.serving == "static":
                yield from multiplexed_gpus(
                    region,
                    fleet.gpus,
                    specs,
                    replay,
                    models_max=fleet.models_per_gpu,
                    events=world.events,
                    answers=world.answers,
                    ended=world.ended,
                )
                continue
            if fleet.layouts:
                yield from _grouped(scenario, region, models, means, world)
                continue
            yield from _pools(fleet, region, specs, replay, world, log)


def _pools(
    fleet: FleetPart,
    region: str,
    models: Sequence[ModelSpec],
    replay: ReplaySettings,
    world: World,
    log: PoolLog | None,
) -> Iterator[PoolServer]:
    """The pool of each node of a region. What weights leave of a node's host memory its slots have in equal shares for
    KV.
    """
    nodes = fleet.pool_nodes
    kinds: list[WorkerKind] = ["prefill"] * (fleet.prefill_slots // nodes)
    kinds += ["decode"] * (fleet.decode_slots // nodes)
    kinds += ["both"] * (fleet.both_slots // nodes)
    for number, mine in enumerate(hosted_models(models, nodes, fleet.host_bytes)):
        if fleet.host_bytes is not None:
            spare_bytes = fleet.host_bytes - sum(model.weights_bytes for model in mine)
            replay = replace(replay, host_kv_bytes=spare_bytes // len(kinds))
        yield PoolServer(
            f"{region}/pool" if nodes == 1 else f"{region}/pool{number}",
            region,
            kinds,
            mine,
            replay,
            events=world.events,
            answers=world.answers,
            ended=world.ended,
            log=log,
        )


def hosted_models(models: Sequence[ModelSpec], nodes: int, host_bytes: int | None) -> list[list[ModelSpec]]:
    """The models of each node: each is on one, the one with the fewest bytes of weights before it, and an adapter where
    its base is. `host_bytes`: host memory of a node; None: no limit.

    Raises:
        ScenarioError: the weights of a node's models do not fit there.
    """
    hosted: list[list[ModelSpec]] = [[] for _ in range(nodes)]
    used_bytes = [0] * nodes
    node_of: dict[str, int] = {}
    for model in sorted(models, key=lambda model: model.base is not None):
        if model.base is None:
            node_of[model.name] = min(range(nodes), key=used_bytes.__getitem__)
        node = node_of[model.checkpoint.name]
        hosted[node].append(model)
        used_bytes[node] += model.weights_bytes
    if host_bytes is not None and max(used_bytes) > host_bytes:
        raise ScenarioError(
            f"fleet.host_bytes: must be at least {max(used_bytes)} for the weights of {len(models)} models"
        )
    return hosted


def _grouped(
    scenario: Scenario, region: str, models: Mapping[str, ModelPart], means: Means, world: World
) -> Iterator[PoolServer]:
    """A pool for the models of each size, on nodes whose GPUs are grouped into slots, which may change."""
    layouts, regroup = scenario.fleet.layouts, scenario.fleet.regroup
    node_gpus = sum(layouts[0])
    of_size: dict[int, list[str]] = {}
    for name, model in sorted(models.items()):
        assert isinstance(model.gpus, int), "the scenario checks that"
        of_size.setdefault(model.gpus, []).append(name)
    pools = {
        size: PoolServer(
            f"{region}/pool of {size}",
            region,
            ["both"] * (len(layouts) * (node_gpus // size)),
            [spec_of(name, models[name], scenario) for name in names],
            replay_settings(scenario, means, size),
            gpus=size,
            opened=opened_slots(layouts, size),
            events=world.events,
            answers=world.answers,
            ended=world.ended,
        )
        for size, names in sorted(of_size.items())
    }
    yield from pools.values()
    if regroup is not None:
        place = RegionGpu(region=region, gpu_type=means.profile.gpu_type)
        costs = {size: [means.costs[name] for name in names] for size, names in of_size.items()}
        settings = RegroupSettings(
            layouts=LayoutSettings(margin=regroup.margin, hold_s=regroup.hold_s),
            every_s=regroup.every_s,
            window_s=regroup.window_s,
            fill=regroup.fill,
            start_s=regroup.start_s,
            prompt_tokens=regroup.prompt_tokens,
            output_tokens=regroup.output_tokens,
            tbt_s=world.settings.targets[Tier.IW_F].tbt_s,
        )
        Regrouper(place, layouts, pools, costs, settings, world.events).begin()


def replay_settings(scenario: Scenario, means: Means, gpus: int = 1) -> ReplaySettings:
    """How the slot of a pool is set up, which has so many GPUs."""
    policy = scenario.policy
    assert means.weights_bytes is not None
    return ReplaySettings(
        profile=means.profile,
        weights_bytes=means.weights_bytes * gpus,
        kv_bytes=means.instance.kv_bytes * gpus,
        batch_max=policy.batch_max,
        prefill_tokens_per_step_max=policy.prefill_tokens_per_step_max,
        prefetch=policy.prefetch,
        kv_pressure=policy.kv_pressure,
        turns=means.instance.turns,
        adapters_bytes=scenario.fleet.adapters_bytes,
        adapter_steps=tuple(scenario.fleet.adapter_steps),
    )


def _request_level(
    scenario: Scenario,
    region: str,
    costs: Mapping[str, ModelCosts],
    settings: InstanceSettings,
    gpu_type: str,
    world: World,
) -> Server:
    fleet = scenario.fleet

    def cluster(name: str, gpus: int, ended: Callable[[Served], None], *, prefill_only: bool) -> RequestLevelCluster:
        return RequestLevelCluster(
            f"{region}/{name}",
            region,
            gpus,
            costs,
            replace(settings, prefill_only=prefill_only),
            gpu_type=gpu_type,
            events=world.events,
            answers=world.answers,
            ended=ended,
            switching=scenario.policy.switching,
            weights_bytes=fleet.weights_bytes or max(model.weights_bytes for model in costs.values()),
            prefetch=scenario.policy.prefetch,
        )

    if fleet.gpus:
        return cluster("gpus", fleet.gpus, world.ended, prefill_only=False)
    decode = cluster("decode", fleet.decode_slots, world.ended, prefill_only=False)

    def prefilled(served: Served) -> None:
        if served.left:
            decode.submit(served)
        else:
            world.ended(served)

    return SplitCluster(cluster("prefill", fleet.prefill_slots, prefilled, prefill_only=True), decode)


def spec_of(name: str, model: ModelPart, scenario: Scenario) -> ModelSpec:
    """A model as a node gets it."""
    base = None if model.base is None else scenario.checkpoint_of(model)
    return ModelSpec(
        name=name,
        path="-",
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        context_tokens=model.context_tokens,
        base=None if base is None else BaseModel(name=base.name, path="-", weights_bytes=base.weights_bytes),
    )
