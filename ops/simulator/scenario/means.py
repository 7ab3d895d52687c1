"""What instances are made from, by GPU type: the profile, what each model costs, and how an instance is set up."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.scheduling.profile import GpuProfile, load_gpu_profile
from dataplane.scheduling.schedule import TurnSettings
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.scenario_values import by_gpu_type
from ops.simulator.scenario.scenario import FleetPart, ModelPart, Scenario, ScenarioError


@dataclass(frozen=True, kw_only=True)
class Means:
    """A GPU type, what each model costs on it, and how an instance is set up there. `weights_bytes`: what the slot of a
    pool has for weights; None: the scenario does not say.
    """

    profile: GpuProfile
    costs: Mapping[str, ModelCosts]
    instance: InstanceSettings
    weights_bytes: int | None


class _Part(NamedTuple):
    """Something that has GPUs: its key in the scenario, the path of its profile, and its memory."""

    key: str
    path: str
    kv_bytes: int
    weights_bytes: int | None


def load_profiles(fleet: FleetPart) -> dict[str, GpuProfile]:
    """The profiles of a fleet by their paths: those of its nodes, or where it has none its own.

    Raises:
        dataplane.scheduling.profile.ProfileError: one cannot be used.
    """
    return {path: load_gpu_profile(path) for path in dict.fromkeys(part.path for part in _parts(fleet))}


def means_of(
    scenario: Scenario, models: Mapping[str, ModelPart], profiles: Mapping[str, GpuProfile]
) -> dict[str, Means]:
    """By GPU type. `profiles`: by path.

    Raises:
        ScenarioError: a GPU type has two profiles or two sizes of memory, or a key names one that the fleet has not.
    """
    fleet = scenario.fleet
    found: dict[str, tuple[_Part, GpuProfile]] = {}
    for part in _parts(fleet):
        profile = profiles[part.path]
        first, other = found.setdefault(profile.gpu_type, (part, profile))
        for name, differs in (
            ("profile", profile != other),
            ("kv_bytes", part.kv_bytes != first.kv_bytes),
            ("weights_bytes", part.weights_bytes != first.weights_bytes),
        ):
            if differs:
                raise ScenarioError(
                    f"{scenario.name}: {part.key}.{name}: is not that of {first.key}; both are of {profile.gpu_type}"
                )
    _check_named(scenario, found)
    return {
        gpu_type: Means(
            profile=replace(profile, cost_per_hour=fleet.cost_per_hour.get(gpu_type, profile.cost_per_hour)),
            costs={name: model_costs(name, scenario.checkpoint_of(model), profile) for name, model in models.items()},
            instance=_instance_settings(scenario, part.kv_bytes),
            weights_bytes=part.weights_bytes,
        )
        for gpu_type, (part, profile) in found.items()
    }


def model_costs(name: str, model: ModelPart, profile: GpuProfile) -> ModelCosts:
    """What a model costs on as many GPUs of a type as it takes there; each has its own way to the host."""
    gpus = by_gpu_type(model.gpus, [profile.gpu_type]).get(profile.gpu_type, 1)
    return ModelCosts(
        name=name,
        latency=profile.nearest_model(model.weights_bytes, gpus).latency,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        bytes_per_s=profile.pcie_bytes_per_s * profile.transfer_efficiency * gpus,
    )


def _parts(fleet: FleetPart) -> list[_Part]:
    """All parts of the fleet that have GPUs."""
    nodes = [
        _Part(
            f"fleet.nodes.{index}",
            node.profile or fleet.profile,
            node.kv_bytes or fleet.kv_bytes,
            node.weights_bytes or fleet.weights_bytes,
        )
        for index, node in enumerate(fleet.nodes)
    ]
    return nodes or [_Part("fleet", fleet.profile, fleet.kv_bytes, fleet.weights_bytes)]


def _check_named(scenario: Scenario, known: Collection[str]) -> None:
    named: list[tuple[str, str | None]] = [("fleet.cost_per_hour", each) for each in scenario.fleet.cost_per_hour]
    named += [(f"fleet.instances.{i}.gpu_type", one.gpu_type) for i, one in enumerate(scenario.fleet.instances)]
    for index, model in enumerate(scenario.models):
        for key, value in (("tokens_per_s", model.tokens_per_s), ("gpus", model.gpus)):
            if isinstance(value, dict):
                named += [(f"models.{index}.{key}", gpu_type) for gpu_type in value]
    for key, gpu_type in named:
        if gpu_type is not None and gpu_type not in known:
            raise ScenarioError(f"{scenario.name}: {key}: {gpu_type!r} is none of {', '.join(sorted(known))}")


def _instance_settings(scenario: Scenario, kv_bytes: int) -> InstanceSettings:
    policy = scenario.policy
    return InstanceSettings(
        kv_bytes=kv_bytes,
        batch_max=policy.batch_max,
        prefill_tokens_per_step_max=policy.prefill_tokens_per_step_max,
        batching=policy.batching,
        prefix_host_bytes=scenario.fleet.prefix_host_bytes,
        turns=TurnSettings(
            prefill=PrefillSettings(order=policy.order, group_requests_max=policy.group_requests_max),
            decode=DecodeSettings(quota_max_s=policy.quota_max_s),
            mixed_batches=policy.mixed_batches,
            time_slices=policy.time_slices,
        ),
    )
