"""What instances are made from, by GPU type: the profile, what each model costs, and how an instance is set up."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dataplane.profile import GpuProfile, load_gpu_profile
from dataplane.turns.decode import DecodeSettings
from dataplane.turns.prefill import PrefillSettings
from dataplane.turns.schedule import TurnSettings
from ops.simulator.costs import InstanceSettings, ModelCosts
from ops.simulator.scenario import FleetPart, ModelPart, Scenario, ScenarioError


@dataclass(frozen=True, kw_only=True)
class Means:
    """A GPU type, what each model costs on it, and how an instance is set up there."""

    profile: GpuProfile
    costs: Mapping[str, ModelCosts]
    instance: InstanceSettings


def load_profiles(fleet: FleetPart) -> dict[str, GpuProfile]:
    """The profiles of a fleet by their paths: those of its nodes, or where it has none its own.

    Raises:
        dataplane.profile.ProfileError: one cannot be used.
    """
    return {path: load_gpu_profile(path) for path in dict.fromkeys(path for _, path, _ in _parts(fleet))}


def means_of(
    scenario: Scenario, models: Mapping[str, ModelPart], profiles: Mapping[str, GpuProfile]
) -> dict[str, Means]:
    """By GPU type. `profiles`: by path.

    Raises:
        ScenarioError: a GPU type has two profiles or two sizes of KV memory, or a key names one that the fleet has not.
    """
    fleet = scenario.fleet
    found: dict[str, tuple[str, GpuProfile, int]] = {}
    for key, path, kv_bytes in _parts(fleet):
        profile = profiles[path]
        first, other, other_bytes = found.setdefault(profile.gpu_type, (key, profile, kv_bytes))
        for name, differs in (("profile", profile != other), ("kv_bytes", kv_bytes != other_bytes)):
            if differs:
                raise ScenarioError(
                    f"{scenario.name}: {key}.{name}: is not that of {first}; both are of {profile.gpu_type}"
                )
    _check_named(scenario, found)
    return {
        gpu_type: Means(
            profile=replace(profile, cost_per_hour=fleet.cost_per_hour.get(gpu_type, profile.cost_per_hour)),
            costs={name: model_costs(name, model, profile) for name, model in models.items()},
            instance=_instance_settings(scenario, kv_bytes),
        )
        for gpu_type, (_, profile, kv_bytes) in found.items()
    }


def model_costs(name: str, model: ModelPart, profile: GpuProfile) -> ModelCosts:
    """What a model costs on a GPU type."""
    return ModelCosts(
        name=name,
        latency=profile.nearest_model(model.weights_bytes).latency,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        bytes_per_s=profile.pcie_bytes_per_s * profile.transfer_efficiency,
    )


def _parts(fleet: FleetPart) -> list[tuple[str, str, int]]:
    """Key, path of the profile and KV memory of whatever has GPUs."""
    nodes = [
        (f"fleet.nodes.{index}", node.profile or fleet.profile, node.kv_bytes or fleet.kv_bytes)
        for index, node in enumerate(fleet.nodes)
    ]
    return nodes or [("fleet", fleet.profile, fleet.kv_bytes)]


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
        turns=TurnSettings(
            prefill=PrefillSettings(order=policy.order, group_requests_max=policy.group_requests_max),
            decode=DecodeSettings(quota_max_s=policy.quota_max_s),
        ),
    )
