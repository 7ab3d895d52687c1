"""A scenario: a TOML file that says what comes, on what it runs, and by which policies. Errors name the key."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from controlplane.policies.facts import InstanceKind
from dataplane.messages import Tier
from dataplane.turns.ordering import Order
from ops.simulator.costs import Batching

PROFILES = Path(__file__).parents[1] / "profiles"

DecodeSlot = Literal["live", "join"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Shares = Annotated[dict[str, Share], Field(min_length=1)]


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the file and the key."""


class Part(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LengthsPart(Part):
    """Lognormal token counts: their median, the standard deviation of the logarithm, and the most."""

    median: Positive
    spread: Share = 1.0
    most: Count = 8192


class BurstPart(Part):
    """For a while the rate is `factor` times as high."""

    start_s: Share
    duration_s: Positive
    factor: Share


class GeneratedPart(Part):
    """Made-up traffic; see `traffic.Generated`. `zipf`: the models' popularity falls with their place in the file."""

    kind: Literal["generated"]
    rate_per_s: Positive
    duration_s: Positive
    cv: Positive = 1.0
    zipf: Share = 0.0
    day_swing: Annotated[float, Field(ge=0, le=1)] = 0.0
    peak_hour: Annotated[float, Field(ge=0, lt=24)] = 14.0
    bursts: list[BurstPart] = []
    origins: Shares
    tiers: Annotated[dict[Tier, Share], Field(min_length=1)]
    prompt_tokens: LengthsPart
    output_tokens: LengthsPart

    @model_validator(mode="after")
    def _somebody(self) -> "GeneratedPart":
        for name in ("origins", "tiers"):
            if not sum(getattr(self, name).values()) > 0:
                raise ValueError(f"{name}: at least one share must be over 0")
        return self


class AegaeonPart(Part):
    """A workload of Aegaeon's artifact; its models take the scenario's by turns: see `[[models]]`."""

    kind: Literal["aegaeon"]
    path: Path
    workload: str
    origin: str
    tier: Tier = "IW-F"


class AzurePart(Part):
    """A line for each request, as Azure published them in 2023; all for one model."""

    kind: Literal["azure-2023"]
    path: Path
    model: str
    origin: str
    tier: Tier = "IW-N"


class ModelPart(Part):
    """A model. Its step times are those of the profile's model nearest in size."""

    name: str
    weights_bytes: Count
    kv_bytes_per_token: Count
    context_tokens: Count = 32_768


class InstancePart(Part):
    """Dedicated instances of a model in a region."""

    model: str
    region: str
    count: Count = 1
    kind: InstanceKind = InstanceKind.MIXED


class FleetPart(Part):
    """What serves. `dedicated` has `instances`; `pooled` has slots in each region, of which `both_slots` prefill and
    decode; `request-level` has `gpus` in each region that do both, or prefill and decode slots. `kv_bytes` and, for
    pools, `weights_bytes` beside it are per GPU.
    """

    serving: Literal["dedicated", "pooled", "request-level"]
    profile: str
    kv_bytes: Count
    weights_bytes: Count | None = None
    instances: list[InstancePart] = []
    prefill_slots: Annotated[int, Field(ge=0)] = 0
    decode_slots: Annotated[int, Field(ge=0)] = 0
    both_slots: Annotated[int, Field(ge=0)] = 0
    gpus: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _complete(self) -> "FleetPart":
        slots = (self.prefill_slots, self.decode_slots, self.both_slots)
        needs = {
            "dedicated": ("instances", bool(self.instances)),
            "pooled": ("prefill_slots and decode_slots, or both_slots", bool(slots[2] or (slots[0] and slots[1]))),
            "request-level": ("gpus, or prefill_slots and decode_slots", bool(self.gpus or (slots[0] and slots[1]))),
        }
        name, there = needs[self.serving]
        if not there:
            raise ValueError(f"serving = {self.serving!r} needs {name}")
        if self.serving == "pooled" and self.weights_bytes is None:
            raise ValueError("serving = 'pooled' needs weights_bytes")
        return self


class PolicyPart(Part):
    """What the policies are told besides their own defaults. `decode_slot` = "join" tries `pool.JoiningDispatcher`."""

    order: Order = "edf"
    batching: Batching = "turns"
    batch_max: Count = 64
    prefill_tokens_per_step_max: Count = 2048
    quota_max_s: Positive = 4.0
    group_requests_max: Count = 8
    region_utilization_max: Positive = 0.7
    prefetch: bool = True
    decode_slot: DecodeSlot = "live"


class TargetPart(Part):
    """Token k, from 0, is due `ttft_s` + k * `tbt_s` after the request came."""

    ttft_s: Positive
    tbt_s: Positive


class Scenario(Part):
    """The whole file. `latencies_ms`: one way, by "origin > destination"; what is not there takes no time."""

    name: str
    seed: Annotated[int, Field(ge=0)] = 1
    regions: Annotated[list[str], Field(min_length=1)]
    latencies_ms: dict[str, Share] = {}
    targets: dict[Tier, TargetPart] = {}
    traffic: Annotated[GeneratedPart | AegaeonPart | AzurePart, Field(discriminator="kind")]
    models: Annotated[list[ModelPart], Field(min_length=1)]
    fleet: FleetPart
    policy: PolicyPart = PolicyPart()

    @model_validator(mode="after")
    def _names(self) -> "Scenario":
        """Whatever is named is there."""
        models, regions = [model.name for model in self.models], set(self.regions)
        if len(set(models)) < len(models):
            raise ValueError("models: a name is there twice")
        for index, instance in enumerate(self.fleet.instances):
            if instance.model not in models:
                raise ValueError(f"fleet.instances.{index}.model: no model {instance.model!r}")
            if instance.region not in regions:
                raise ValueError(f"fleet.instances.{index}.region: no region {instance.region!r}")
        if isinstance(self.traffic, AzurePart) and self.traffic.model not in models:
            raise ValueError(f"traffic.model: no model {self.traffic.model!r}")
        for key in self.latencies_ms:
            if not set(self.ends(key)) <= regions | self.origins or len(self.ends(key)) != 2:
                raise ValueError(f"latencies_ms.{key}: must be 'origin > destination'")
        return self

    @property
    def origins(self) -> set[str]:
        """Where requests come from."""
        traffic = self.traffic
        return set(traffic.origins) if isinstance(traffic, GeneratedPart) else {traffic.origin}

    @staticmethod
    def ends(key: str) -> tuple[str, ...]:
        """Origin and destination."""
        return tuple(end.strip() for end in key.split(">"))


def load_scenario(path: Path) -> Scenario:
    """The scenario in a file. Paths in it are relative to the file; a profile may be one of `ops/profiles` by name.

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
        return Scenario.model_validate(_located(document, path.parent))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ScenarioError(f"{path}: {key + ': ' if key else ''}{first['msg']}") from error


def _located(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The document with its files where they are."""
    traffic, fleet = document.get("traffic"), document.get("fleet")
    if isinstance(traffic, dict) and isinstance(traffic.get("path"), str):
        document["traffic"] = traffic | {"path": folder / traffic["path"]}
    if isinstance(fleet, dict) and isinstance(fleet.get("profile"), str):
        own = folder / fleet["profile"]
        document["fleet"] = fleet | {"profile": str(own if own.exists() else PROFILES / fleet["profile"])}
    return document
