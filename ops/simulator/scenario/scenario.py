"""A scenario: a TOML file that says what comes, on what it runs, and by which policies. Errors name the key."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from dataplane.engines.core.pressure import KvPressure
from dataplane.protocol.layouts import check_layout
from dataplane.protocol.tiers import OBJECTIVE_TBT_MAX_S, OBJECTIVE_TTFT_MAX_S, InstanceKind, Tier
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.ordering import Order
from ops.simulator.kernel.costs import Batching
from ops.simulator.kernel.scenario_values import FORMS, ByGpuType, Count, Part, Positive, Share
from ops.simulator.scenario.changes import ChangeError, with_settings, with_trace
from ops.simulator.scenario.planning import (
    FailurePart,
    NodesPart,
    PlanningPart,
    ProvisioningPart,
    RegroupPart,
    ScalingPart,
    Strategy,
)
from ops.simulator.servers.request_level import Switching
from ops.simulator.traffic.traffic_parts import AegaeonPart, MixedPart, OnePart, TrafficPart

PROFILES = Path(__file__).parents[2] / "profiles"


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the file and the key."""


class ModelPart(Part):
    """A model. Its step times are those of the profile's model nearest in size on as many GPUs. Where it is scaled,
    `tokens_per_s` is what the planner takes one instance to serve within its objectives, in input tokens (theta), on
    `gpus` of a slot: a number, or a table by GPU type. On a type that such a table does not name it is not placed.
    `base`: the model to which it is a LoRA adapter; its `weights_bytes` are then its own, and all else is its base's.
    `with_base`: the instances of its base serve it, so that its requests are requests of the base.
    """

    name: str
    base: str | None = None
    with_base: bool = False
    weights_bytes: Count
    kv_bytes_per_token: Count
    context_tokens: Count = 32_768
    tokens_per_s: ByGpuType[Positive] | None = None
    gpus: ByGpuType[Count] = 1

    @model_validator(mode="after")
    def _with_base(self) -> "ModelPart":
        if self.with_base and self.base is None:
            raise ValueError("with_base: only a LoRA adapter is served with its base")
        return self


class InstancePart(Part):
    """Dedicated instances of a model in a region. `gpu_type` None: whichever suits."""

    model: str
    region: str
    gpu_type: str | None = None
    count: Count = 1
    kind: InstanceKind = InstanceKind.MIXED


_SLOTS: Mapping[str, frozenset[str]] = {
    "dedicated": frozenset(),
    "pooled": frozenset({"prefill_slots", "decode_slots", "both_slots", "layouts"}),
    "request-level": frozenset({"prefill_slots", "decode_slots", "gpus"}),
    "static": frozenset({"gpus"}),
}
"""Which counts of slots each way of serving has."""


class FleetPart(Part):
    """What serves. `dedicated` has `instances`; `pooled` has slots in each region, of which `both_slots` prefill and
    decode, on `pool_nodes` alike: each is a pool by itself, has its share of the models, keeps their KV, and has
    `host_bytes` of host memory for both (without it: no limit); or nodes with `layouts` in each region, whose slots
    serve models of as many GPUs as they have, for good or with `regroup` as the demand asks for; `request-level` has
    `gpus` in each region that do both, or prefill and decode slots; `static` has `gpus` in each region, each with
    `models_per_gpu` for good. `kv_bytes` and `weights_bytes` are per GPU: pools need the latter, and request-level
    serving has memory for the largest model without it. `prefix_host_bytes`: host memory of a dedicated instance for
    prefixes. `adapters_bytes`: memory of a pool's slot for LoRA adapters, beside its other memory; `adapter_steps`: by
    how much a step of a pool takes longer with so many adapters in it, as [adapters, factor]: as measured on a CPU
    with rank 16. Where dedicated instances are scaled, `instances` are those there at the beginning, and `nodes` take
    them; each of those may have a profile, `kv_bytes` and `weights_bytes` of its own, the latter of the slots of pools
    that plans make. `cost_per_hour`: of one GPU by GPU type, in place of its profile's.
    """

    serving: Literal["dedicated", "pooled", "request-level", "static"]
    profile: str
    kv_bytes: Count
    weights_bytes: Count | None = None
    prefix_host_bytes: Annotated[int, Field(ge=0)] = 0
    adapters_bytes: Annotated[int, Field(ge=0)] = 2**30
    adapter_steps: list[tuple[Count, Positive]] = Field(default=[(1, 1.0), (4, 1.11), (16, 1.33)])
    cost_per_hour: dict[str, Share] = Field(default_factory=dict)
    instances: list[InstancePart] = Field(default_factory=list)
    nodes: list[NodesPart] = Field(default_factory=list)
    prefill_slots: Annotated[int, Field(ge=0)] = 0
    decode_slots: Annotated[int, Field(ge=0)] = 0
    both_slots: Annotated[int, Field(ge=0)] = 0
    pool_nodes: Count = 1
    host_bytes: Count | None = None
    layouts: list[tuple[Count, ...]] = Field(default_factory=list)
    regroup: RegroupPart | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    models_per_gpu: Count = 2

    @model_validator(mode="after")
    def _complete(self) -> "FleetPart":
        slots = (self.prefill_slots, self.decode_slots, self.both_slots)
        needs = {
            "dedicated": ("instances", bool(self.instances or self.nodes)),
            "pooled": (
                "prefill_slots and decode_slots, or both_slots, or layouts",
                bool(slots[2] or (slots[0] and slots[1]) or self.layouts),
            ),
            "request-level": ("gpus, or prefill_slots and decode_slots", bool(self.gpus or (slots[0] and slots[1]))),
            "static": ("gpus", bool(self.gpus)),
        }
        name, there = needs[self.serving]
        if not there:
            raise ValueError(f"serving = {self.serving!r} needs {name}")
        for key in sorted(frozenset[str]().union(*_SLOTS.values()) - _SLOTS[self.serving]):
            if getattr(self, key):
                raise ValueError(f"{key}: serving = {self.serving!r} has none; a fleet serves in one way only")
        if self.serving in ("pooled", "static") and self.weights_bytes is None:
            raise ValueError(f"serving = {self.serving!r} needs weights_bytes")
        if self.serving != "pooled" and (self.pool_nodes > 1 or self.host_bytes is not None):
            raise ValueError("pool_nodes, host_bytes: only serving = 'pooled' has them")
        for key, count in zip(("prefill_slots", "decode_slots", "both_slots"), slots, strict=True):
            if count % self.pool_nodes:
                raise ValueError(f"{key}: must be a multiple of pool_nodes, {self.pool_nodes}")
        return self

    @model_validator(mode="after")
    def _rising(self) -> "FleetPart":
        """Check the factors of adapters."""
        counts = [count for count, _ in self.adapter_steps]
        if counts != sorted(set(counts)):
            raise ValueError("adapter_steps: must be in rising order of adapters")
        return self

    @model_validator(mode="after")
    def _grouped(self) -> "FleetPart":
        """Check the layouts of nodes."""
        if self.regroup is not None and not self.layouts:
            raise ValueError("regroup: needs layouts; nothing else can be regrouped")
        if self.layouts and any(slots := (self.prefill_slots, self.decode_slots, self.both_slots)):
            raise ValueError(f"layouts: leave no place for {sum(slots)} other slots")
        if self.layouts and (self.pool_nodes > 1 or self.host_bytes is not None):
            raise ValueError("pool_nodes, host_bytes: nodes with layouts have none")
        for index, layout in enumerate(self.layouts):
            try:
                check_layout(layout, sum(self.layouts[0]))
            except ValueError as error:
                raise ValueError(f"layouts.{index}: {error}") from error
        return self


class PolicyPart(Part):
    """Settings of the policies. `switching`: of request-level serving. `timely_share`: of the objective for the first
    token, within which an instance is well in time and goes before others. `prefetch`: whether slots of pools, and GPUs
    of request-level serving, load the next model while they serve another, where both fit. `rerouting`: whether waiting
    requests move to idle instances. `admission`: whether requests that no instance would begin in time are refused.
    `tries_max`: how often a client sends one, after the Retry-After of each refusal; TTFT counts from the first.
    `view_s`: how often instances report and deferred requests are released. `gateways`: each knows of the prompts that
    it sent. `prefix_cache`: whether dedicated instances compute prompts that begin alike once, where a recording has
    hashes of their blocks. `clairvoyant`: whether queues, drains and KV pressure know how long each answer will be;
    live, and by default, they expect what answers of the model were. `mixed_batches`: whether a step of a pool's slot,
    or of a dedicated instance with `batching = "turns"`, prefills beside the batch that decodes. `time_slices`: how
    models of a pool's slot share its time. `kv_pressure`: what slots of pools do when KV has no room; a model's weights
    are in 32 layers.
    """

    order: Order = "edf"
    switching: Switching = "first-come"
    batching: Batching = "turns"
    batch_max: Count = 64
    prefill_tokens_per_step_max: Count = 2048
    mixed_batches: bool = False
    time_slices: TimeSlices = "deadlines"
    quota_max_s: Positive = 4.0
    group_requests_max: Count = 8
    region_utilization_max: Positive = 0.7
    timely_share: Annotated[Positive, Field(le=1)] = 0.5
    prefetch: bool = True
    kv_pressure: KvPressure = "swap"
    rerouting: bool = False
    admission: bool = False
    tries_max: Annotated[int, Field(ge=1, le=1000)] = 1
    view_s: Positive = 1.0
    gateways: Annotated[int, Field(ge=1, le=1000)] = 1
    prefix_cache: bool = True
    clairvoyant: bool = False

    @model_validator(mode="after")
    def _refusing(self) -> "PolicyPart":
        if self.tries_max > 1 and not self.admission:
            raise ValueError("tries_max: needs admission = true; nobody is refused without")
        return self


class TargetPart(Part):
    """Token k, from 0, is due `ttft_s` + k * `tbt_s` after the request arrived."""

    ttft_s: Annotated[Positive, Field(le=OBJECTIVE_TTFT_MAX_S)]
    tbt_s: Annotated[Positive, Field(le=OBJECTIVE_TBT_MAX_S)]


class Scenario(Part):
    """The whole file. `latencies_ms`: one way, by "origin > destination"; what is not there takes no time."""

    name: str
    seed: Annotated[int, Field(ge=0)] = 1
    regions: Annotated[list[str], Field(min_length=1)]
    latencies_ms: dict[str, Share] = Field(default_factory=dict)
    targets: dict[Tier, TargetPart] = Field(default_factory=dict)
    traffic: TrafficPart
    models: Annotated[list[ModelPart], Field(min_length=1)]
    fleet: FleetPart
    policy: PolicyPart = PolicyPart()
    scaling: ScalingPart | None = None
    planning: PlanningPart = PlanningPart()
    provisioning: ProvisioningPart = ProvisioningPart()
    failures: list[FailurePart] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names(self) -> "Scenario":
        """Check that all names refer to something."""
        models, regions = [model.name for model in self.models], set(self.regions)
        if len(set(models)) < len(models):
            raise ValueError("models: a name is there twice")
        if len(regions) < len(self.regions):
            raise ValueError("regions: a name is there twice")
        kept_bytes = self.fleet.weights_bytes
        largest = max(self.models, key=lambda model: model.weights_bytes)
        if self.fleet.serving == "request-level" and kept_bytes is not None and kept_bytes < largest.weights_bytes:
            raise ValueError(
                f"fleet.weights_bytes: must be at least {largest.weights_bytes}, those of {largest.name!r}"
            )
        for index, instance in enumerate(self.fleet.instances):
            if instance.model not in set(models) - self.served_bases.keys():
                raise ValueError(
                    f"fleet.instances.{index}.model: no model {instance.model!r} with instances of its own"
                )
            if instance.region not in regions:
                raise ValueError(f"fleet.instances.{index}.region: no region {instance.region!r}")
        for key, part in self._traffics():
            for model in getattr(part, "models", None) or ():
                if model not in models:
                    raise ValueError(f"{key}.models.{model}: no such model")
        for key in self.latencies_ms:
            if not set(self.ends(key)) <= regions | self.origins or len(self.ends(key)) != 2:
                raise ValueError(f"latencies_ms.{key}: must be 'origin > destination'")
        return self

    @model_validator(mode="after")
    def _based(self) -> "Scenario":
        """Check the adapters."""
        models = {model.name: model for model in self.models}
        for index, adapter in enumerate(self.models):
            if adapter.base is None:
                continue
            base = models.get(adapter.base)
            if base is None or base.base is not None:
                raise ValueError(f"models.{index}.base: {adapter.base!r} is no model that adapters can be of")
            for key in ("kv_bytes_per_token", "context_tokens"):
                if getattr(adapter, key) != getattr(base, key):
                    raise ValueError(f"models.{index}.{key}: must be {getattr(base, key)}, that of {base.name!r}")
            if isinstance(self.traffic, AegaeonPart):
                raise ValueError(f"models.{index}.base: traffic.kind = 'aegaeon' names the models itself")
            if adapter.with_base:
                continue
            if differing_gpus(adapter.gpus, base.gpus):
                raise ValueError(f"models.{index}.gpus: must be those of {base.name!r}")
            if self.fleet.serving in ("request-level", "static"):
                raise ValueError(f"models.{index}.base: serving = {self.fleet.serving!r} knows whole models only")
            if self.fleet.regroup is not None:
                raise ValueError(f"models.{index}.base: fleet.regroup counts whole models only")
        own = [model for model in self.models if model.base is not None and not model.with_base]
        adapters_bytes = sum(model.weights_bytes for model in own)
        if adapters_bytes > self.fleet.adapters_bytes:
            raise ValueError(f"fleet.adapters_bytes: must be at least {adapters_bytes}, those of all adapters")
        return self

    @model_validator(mode="after")
    def _scaled(self) -> "Scenario":
        """Check the tables of fleets that are scaled."""
        regions, models = set(self.regions), {model.name for model in self.models}
        named = [(f"fleet.nodes.{i}.region", node.region, regions) for i, node in enumerate(self.fleet.nodes)]
        named += [(f"failures.{i}.region", one.region, regions) for i, one in enumerate(self.failures)]
        for model, places in self.provisioning.weights.items():
            named.append(("provisioning.weights", model, models))
            named += [(f"provisioning.weights.{model}", region, regions) for region in places]
        for key, name, known in named:
            if name not in known:
                raise ValueError(f"{key}: {name!r} is none of {', '.join(sorted(known))}")
        if self.scaling is None:
            for key in self._of_scaling():
                raise ValueError(f"{key}: needs [scaling], and says nothing without")
            return self
        if self.fleet.serving != "dedicated" or not self.fleet.nodes:
            raise ValueError("scaling: needs fleet.serving = 'dedicated' and fleet.nodes")
        if self.planning.layouts and not any(node.layout for node in self.fleet.nodes):
            raise ValueError("planning.layouts: needs a layout in fleet.nodes")
        for index, each in enumerate(self.models):
            if each.tokens_per_s is None and not each.with_base:
                raise ValueError(f"models.{index}.tokens_per_s: is needed where [scaling] is")
        return self

    @model_validator(mode="after")
    def _sized(self) -> "Scenario":
        """Check that there may be slots for every model."""
        sizes = {size for layout in self.fleet.layouts for size in layout}
        most = sum(self.fleet.layouts[0]) if self.fleet.layouts else 0
        for index, model in enumerate(self.models if self.fleet.layouts else ()):
            if isinstance(model.gpus, dict):
                raise ValueError(
                    f"models.{index}.gpus: must be a number with fleet.layouts, whose GPUs are of one type"
                )
            regroups = self.fleet.regroup is not None and model.gpus <= most and not model.gpus & (model.gpus - 1)
            if model.gpus not in sizes and not regroups:
                raise ValueError(f"models.{index}.gpus: no node has slots of {model.gpus} GPUs, nor may it get some")
        return self

    @model_validator(mode="after")
    def _pooled(self) -> "Scenario":
        """Check what plans need for pools."""
        if self.planning.shares_gpus:
            key = "planning.reserve" if self.planning.reserve else "planning.pools"
            for index, node in enumerate(self.fleet.nodes):
                if node.host_bytes is None:
                    raise ValueError(f"fleet.nodes.{index}.host_bytes: is needed where {key} is set")
                if (node.weights_bytes or self.fleet.weights_bytes) is None:
                    raise ValueError(f"fleet.weights_bytes: is needed where {key} is set")
        return self

    def _of_scaling(self) -> Iterator[str]:
        """Keys of the file that need [scaling]."""
        for key, given in (("failures", self.failures), ("fleet.nodes", self.fleet.nodes)):
            if given:
                yield key
        sized = [index for index, model in enumerate(self.models) if model.gpus != 1]
        yield from (f"models.{index}.gpus" for index in sized if not self.fleet.layouts)
        yield from (f"provisioning.{key}" for key in sorted(self.provisioning.model_fields_set))
        yield from (f"planning.{key}" for key in sorted(self.planning.model_fields_set - {"learn_s"}))

    def with_strategy(self, strategy: str) -> "Scenario":
        """The same under another scaling strategy.

        Raises:
            ScenarioError: nothing is scaled in it, or there is no such strategy.
        """
        if self.scaling is None:
            raise ScenarioError(f"{self.name}: scaling: is needed for a strategy")
        if strategy not in get_args(Strategy):
            raise ScenarioError(f"strategy {strategy!r} is none of {', '.join(get_args(Strategy))}")
        return self.model_copy(update={"scaling": self.scaling.model_copy(update={"strategy": strategy})})

    def checkpoint_of(self, model: ModelPart) -> ModelPart:
        """The model whose weights a model needs: the base of an adapter, or itself."""
        return next(one for one in self.models if one.name == (model.base or model.name))

    @property
    def served_bases(self) -> dict[str, str]:
        """The bases of the adapters that are served with them, by the adapter's name."""
        return {model.name: model.base for model in self.models if model.with_base and model.base is not None}

    @property
    def origins(self) -> set[str]:
        return {origin for _, part in self._traffics() for origin in part.origins or self.regions}

    def _traffics(self) -> Iterator[tuple[str, OnePart | AegaeonPart]]:
        """What comes, one traffic at a time, each with its key."""
        if isinstance(self.traffic, MixedPart):
            yield from ((f"traffic.parts.{place}", part) for place, part in enumerate(self.traffic.parts))
        else:
            yield "traffic", self.traffic

    @staticmethod
    def ends(key: str) -> tuple[str, ...]:
        return tuple(end.strip() for end in key.split(">"))


def differing_gpus(one: ByGpuType[Count], other: ByGpuType[Count]) -> bool:
    """Whether two models take different numbers of GPUs on some type on which both may be."""
    if isinstance(one, dict) and isinstance(other, dict):
        return any(one[gpu_type] != other[gpu_type] for gpu_type in one.keys() & other.keys())
    return one != other


def load_scenario(path: Path, *, trace: str | None = None, settings: Sequence[str] = ()) -> Scenario:
    """The scenario in a file. Paths in it are relative to the file; a profile may be one of `ops/profiles` by name.

    Args:
        path: the file.
        trace: a recording in the place of its traffic; see `changes.with_trace`.
        settings: keys to set; see `changes.with_settings`.

    Raises:
        ScenarioError: the file cannot be read, or a key is missing, unknown or out of range.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: is not TOML: {error}") from error
    try:
        traced = document if trace is None else with_trace(document, trace)
        return Scenario.model_validate(_located(with_settings(traced, settings), path.parent))
    except ChangeError as error:
        raise ScenarioError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = _key(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ScenarioError(f"{path}: {key + ': ' if key else ''}{message}") from error


def _key(places: tuple[int | str, ...]) -> str:
    """The key of an error as in the file, without the tags of unions."""
    table, *rest = places or ("",)
    kept = [place for place in rest if place not in FORMS]
    if table == "traffic":
        kept = kept[1:]
        if kept[:1] == ["parts"]:
            kept[2:3] = []
    return ".".join(map(str, (table, *kept)))


def _located(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The document with paths relative to its folder resolved."""
    traffic, fleet = document.get("traffic"), document.get("fleet")
    if isinstance(traffic, dict):
        parts = traffic.get("parts")
        mixed = {"parts": [_recorded(part, folder) for part in parts]} if isinstance(parts, list) else {}
        document["traffic"] = _recorded(traffic, folder) | mixed
    if isinstance(fleet, dict):
        nodes = fleet.get("nodes")
        located = {"nodes": [_profiled(node, folder) for node in nodes]} if isinstance(nodes, list) else {}
        document["fleet"] = _profiled(fleet, folder) | located
    return document


def _recorded(table: Any, folder: Path) -> Any:
    """A traffic with the paths of its files resolved, if it names any."""
    if not isinstance(table, dict):
        return table
    return table | {key: folder / table[key] for key in ("path", "lengths") if isinstance(table.get(key), str)}


def _profiled(table: Any, folder: Path) -> Any:
    """A table with the path of its profile resolved, if it names one."""
    if not isinstance(table, dict) or not isinstance(table.get("profile"), str):
        return table
    own = folder / table["profile"]
    return table | {"profile": str(own if own.exists() else PROFILES / table["profile"])}
