"""What the admin API takes about a fleet and its tenants: types of names and numbers, each with its limit, and bodies.

It imports pydantic and the protocol only, so that a command line without the control plane's libraries can check the
same before it asks.
"""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field

from controlplane.bodies import ClientBody
from dataplane.protocol.messages import EngineChoice, Task
from dataplane.protocol.model_sources import SOURCE_CHARACTERS_MAX, check_source
from dataplane.protocol.parsers import ReasoningParserName, ToolParserName
from dataplane.protocol.tiers import OBJECTIVE_TBT_MAX_S, OBJECTIVE_TTFT_MAX_S

INT64_MAX = 2**63 - 1

_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_GPU_TYPE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_MODEL = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
TEXT = r"^[^\x00]*$"

RegionName = Annotated[str, Field(pattern=_NAME, examples=["us-east"])]
GpuTypeName = Annotated[str, Field(pattern=_GPU_TYPE, examples=["H800"])]
ModelName = Annotated[str, Field(pattern=_MODEL, examples=["Qwen/Qwen3-8B"])]
KeyName = Annotated[str, Field(pattern=_NAME, examples=["dashboard"])]
Tenant = Annotated[str, Field(pattern=_NAME, examples=["default"])]
CheckpointPath = Annotated[
    str, Field(max_length=SOURCE_CHARACTERS_MAX, examples=["/models/qwen3-8b"]), AfterValidator(check_source)
]
OwnerName = Annotated[str, Field(pattern=_NAME, examples=["apply"])]
Architecture = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["Qwen3ForCausalLM"])]

Note = Annotated[str, Field(max_length=500, pattern=TEXT)]

PositiveInt = Annotated[int, Field(strict=True, gt=0, le=INT64_MAX)]
Count = Annotated[int, Field(strict=True, ge=0, le=100_000)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0, le=1e15, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Milliseconds = Annotated[Number, Field(le=60_000)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=3600, allow_inf_nan=False)]
"""The duration of a step, or of a part of one."""


def name_fault(name: str) -> str | None:
    """Why no new thing may have a name, which is part of its path: clients would make the path of something else of it.
    None: it may. What has such a name from an earlier release keeps it.
    """
    if {"", ".", ".."}.isdisjoint(name.split("/")):
        return None
    return f"'{name}': none of the parts that '/' separates may be empty, '.' or '..'"


class Body(ClientBody):
    """What a client sends. A field that is not known is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


class RegionChange(Body):
    """Where a region stands in the order of preference."""

    position: Count | None = Field(None, description="lower is preferred; a new region without one goes last")


class RegionLatency(Body):
    """How far one region is from another."""

    origin: RegionName
    destination: RegionName = Field(examples=["us-west"])
    ms: Milliseconds = Field(description="milliseconds there and back", examples=[62.0])


class GpuTypeChange(Body):
    """What a GPU type has and costs."""

    memory_bytes: PositiveInt = Field(description="memory of one GPU", examples=[85_899_345_920])
    cost_per_hour: Number = Field(description="of one GPU, in your currency", examples=[2.5])


class Objective(Body):
    """What a tier promises: its first token, and each token after it."""

    ttft_s: PositiveNumber = Field(le=OBJECTIVE_TTFT_MAX_S, examples=[1.0])
    tbt_s: PositiveNumber = Field(le=OBJECTIVE_TBT_MAX_S, examples=[0.1])


class ModelChange(Body):
    """A checkpoint and what it needs, or a LoRA adapter of another model. `tidepool model add` derives all of it."""

    path: CheckpointPath = Field(
        description="checkpoint in Hugging Face format: a folder or a source that nodes can read; with a base, the"
        " folder of the adapter"
    )
    architecture: Architecture
    weights_bytes: PositiveInt = Field(examples=[16_381_470_720])
    parameters: PositiveInt | None = Field(
        None,
        examples=[8_190_735_360],
        description="elements of the weights, tied ones once; with it, models are kept from slots that are too small"
        " for them in the data type of the node",
    )
    kv_bytes_per_token: PositiveInt = Field(examples=[147_456])
    context_tokens: PositiveInt = Field(description="the longest prompt and answer together", examples=[40_960])
    slo: dict[Literal["IW-F", "IW-N"], Objective] | None = Field(
        None, description="objectives by tier, where they differ from the settings'"
    )
    engine: EngineChoice = Field(
        "auto",
        description="what its dedicated instances run on; auto: the faster where both were measured, else what the node"
        " prefers; pooled ones run on torch, but for adapters and their base where vllm is chosen for all of a slot."
        " Instances that are alive move one after the other",
    )
    task: Task = Field(
        "generate",
        description="what it answers with: text, embeddings, or scores of pairs of texts; on torch the last two, unless"
        " engine is vllm",
    )
    tool_parser: ToolParserName | None = Field(
        None,
        description="how it writes tool calls; json: without markers; none: they are not looked for; null: as its chat"
        " template suggests",
    )
    reasoning_parser: ReasoningParserName | None = Field(
        None,
        description="how it writes reasoning; qwen3: between `<think>` tags; deepseek_r1: so, and always first"
        "; none: it is content; null: as its chat template suggests",
    )
    base: ModelName | None = Field(
        None,
        examples=["qwen3-8b"],
        description="the registered model to which this one is a LoRA adapter: path, weights_bytes and parameters are"
        " then the adapter's, the rest is as for the base",
    )
    with_base: bool = Field(
        False,
        description="an adapter that the instances of its base serve too, wherever that is offered: it has no endpoints"
        " and no instances of its own, and its demand counts as its base's",
    )


class Latency(Body):
    """How long steps and switches of a model take, in seconds: Aegaeon A.2, with a term for each sequence."""

    prefill_base_s: Seconds = Field(description="of every prefill", examples=[5.7e-3])
    prefill_per_token_s: Seconds = Field(examples=[2.3e-5])
    prefill_per_token2_s: Seconds = Field(description="for each squared token of a prompt", examples=[2.1e-10])
    decode_base_s: Seconds = Field(description="of every decode step", examples=[8.5e-3])
    decode_per_context_token_s: Seconds = Field(examples=[4.4e-8])
    decode_per_sequence_s: Seconds = Field(examples=[1.1e-4])
    switch_s: Seconds = Field(description="to bring its weights from host memory", examples=[0.47])
    source: str = Field(max_length=500, pattern=TEXT, examples=["7B on H800: profiles/qwen2_5_7b/H800/1"])


class EngineRates(Body):
    """Tokens per second of both engines, measured side by side."""

    torch: PositiveNumber = Field(examples=[9000.0])
    vllm: PositiveNumber = Field(examples=[15_000.0])


class Throughput(Body):
    """What one instance of a model does. Without a latency it is never pooled there."""

    tokens_per_s: PositiveNumber = Field(description="input tokens per second at its SLO", examples=[12_000.0])
    gpus: PositiveInt = Field(description="GPUs of one instance", examples=[1], le=1024)
    load_time_s: Number = Field(description="seconds to load it within a region", examples=[30.0])
    latency: Latency | None = None
    engine_rates: EngineRates | None = Field(
        None, description="where the model's engine is auto, its dedicated instances run on the faster one"
    )


class Profile(Throughput):
    """What one instance of a model does on a GPU type. Without a latency it is never pooled there."""

    model: ModelName
    gpu_type: GpuTypeName


class InstanceLimits(Body):
    """How many instances an endpoint may have."""

    instances_min: Count = Field(examples=[0])
    instances_max: Count = Field(examples=[8])


class EndpointChange(InstanceLimits):
    """A model in a region, and how many instances it may have."""

    model: ModelName
    region: RegionName


Weight = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
TARGETS_MAX = 16
SHARES_MAX = 20


class AliasChange(Body):
    """The models of an alias. Each gets its weight's share of the sum."""

    targets: dict[ModelName, Weight] = Field(
        min_length=1,
        max_length=TARGETS_MAX,
        description="weights by model; the models answer with the same kind of thing",
        examples=[{"qwen3-8b": 95, "qwen3-8b-r2": 5}],
    )


def _rising(steps: list[int]) -> list[int]:
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError("the shares must rise")
    return steps


class NewRollout(Body):
    """Another model for an alias, and how carefully it comes."""

    alias: ModelName = Field(description="the alias; or a model, which then becomes an alias of itself")
    model: ModelName = Field(description="the candidate, registered and offered where the models before are")
    steps: Annotated[
        list[Annotated[int, Field(strict=True, ge=1, le=100)]],
        Field(min_length=1, max_length=SHARES_MAX, description="its shares in percent, rising"),
        AfterValidator(_rising),
    ] = Field(default=[5, 25, 50, 100])
    hold_s: Annotated[float, Field(strict=True, ge=0, le=7 * 86_400, allow_inf_nan=False)] = Field(
        600.0, description="how long each step lasts at least"
    )
    answers_min: Count = Field(100, description="answers of the candidate that each step waits for")
    worse_max: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = Field(
        0.02,
        description="it goes back where the candidate's share of answers that failed, or of those that missed their"
        " objective, exceeds that of the models before by more than this and beyond chance",
    )
    keep: bool = Field(
        True,
        description="the models before keep their instances until the end, so that it can go back at once; false: they"
        " shrink with their share",
    )


_NONE = "null: without limit"


class TenantChange(Body):
    """Limits of a tenant. What is left out is without limit."""

    requests_per_minute: PositiveInt | None = Field(
        None, description=f"interactive requests, uploads and new batches; {_NONE}", examples=[600]
    )
    tokens_per_minute: PositiveInt | None = Field(
        None, description=f"prompt and completion tokens of interactive requests; {_NONE}", examples=[200_000]
    )
    concurrent_max: PositiveInt | None = Field(
        None, description=f"interactive requests at once; {_NONE}", examples=[50]
    )
    queued_batch_tokens_max: Annotated[int, Field(strict=True, ge=0, le=INT64_MAX)] | None = Field(
        None, description=f"tokens of batch requests that have not ended; {_NONE}", examples=[5_000_000]
    )
    tokens_per_day: PositiveInt | None = Field(
        None, description=f"budget of interactive requests' tokens for a day in UTC; {_NONE}", examples=[2_000_000]
    )
    tokens_per_month: PositiveInt | None = Field(
        None, description=f"budget of interactive requests' tokens for a month in UTC; {_NONE}", examples=[50_000_000]
    )
    tokens_total: PositiveInt | None = Field(
        None, description=f"budget of interactive requests' tokens for ever; {_NONE}", examples=[100_000_000]
    )


class Override(Body):
    """What to keep, and how long."""

    instances: Count = Field(description="not fewer and not more; it stands in place of the endpoint's limits")
    until: AwareDatetime = Field(
        description="when the pin ends, with its time zone; every pin ends", examples=["2026-11-27T18:00:00Z"]
    )
    note: Note = Field("", description="why, in your words", examples=["launch week"])


class NewPin(Override):
    """What to keep of an endpoint, and how long."""

    model: ModelName
    region: RegionName
