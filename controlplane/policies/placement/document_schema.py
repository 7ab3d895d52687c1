"""The schema of a placement problem as a JSON document. `document.py` turns it into facts and back.

Unknown fields are refused. `schema()` is the JSON Schema of it, with what is said here.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from dataplane.protocol.tiers import Tier

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class DocumentError(ValueError):
    """A document that is refused. The message names the field by its path, such as `$.demand[3].model`."""


class _Section(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, omit_defaults=True):
    """What every part of the document has in common."""


class _OfEndpoint(_Section, frozen=True, kw_only=True):
    """Of a model in a region."""

    model: Name
    region: Name


class _OfCell(_OfEndpoint, frozen=True, kw_only=True):
    """Of a model in a region on a GPU type."""

    gpu: Name


class Gpu(_Section, frozen=True, kw_only=True):
    """A GPU type."""

    name: Name
    cost_per_hour: Annotated[float, Meta(ge=0, description="of one GPU; its unit is the unit of the objective")]
    gpus_per_region: Annotated[dict[str, int], Meta(description="GPUs in each region, in use or not")] = {}
    host_bytes: Annotated[int, Meta(ge=0, description="host memory for pooled weights that a pool GPU brings")] = 0


class Model(_Section, frozen=True, kw_only=True):
    """A model."""

    name: Name
    memory_bytes: Annotated[int, Meta(ge=0, description="its weights; needed where it may be pooled")] = 0
    tiers: Annotated[list[Tier], Meta(min_length=1, description="the strictest sets what unserved demand costs")] = (
        field(default_factory=lambda: [Tier.IW_F])
    )


class StartSeconds(_Section, frozen=True, kw_only=True):
    """Seconds to start one instance, by what it starts from."""

    local: Annotated[float, Meta(ge=0, description="fresh, weights in the region")] = 600.0
    remote: Annotated[float, Meta(ge=0, description="fresh, weights in another region")] = 7200.0
    spot_same: Annotated[float, Meta(ge=0, description="a spot instance of the same model")] = 60.0
    spot_other: Annotated[float, Meta(ge=0, description="a spot instance of another model, weights in the region")] = (
        600.0
    )


class Instance(_Section, frozen=True, kw_only=True):
    """What one instance of a model does on a GPU type; pairs that are missing cannot be placed."""

    model: Name
    gpu: Name
    tokens_per_s: Annotated[float, Meta(gt=0, description="input tokens per second at its SLO")]
    gpus: Annotated[int, Meta(ge=1, description="GPUs it takes")] = 1
    start_s: StartSeconds = StartSeconds()


class CellCount(_OfCell, frozen=True, kw_only=True):
    """So many instances of a model in a region on a GPU type."""

    count: Count


class Demand(_OfEndpoint, frozen=True, kw_only=True):
    """Input tokens per second of a model in a region, for each window of the hour; as many windows everywhere."""

    tokens_per_s: Annotated[list[NotNegative], Meta(min_length=1)]


class Limit(_OfEndpoint, frozen=True, kw_only=True):
    """Fewest and most instances of a model in a region, over all GPU types. Without one: 0 and no limit."""

    min: Count = 0
    max: Count


class Pin(_OfEndpoint, frozen=True, kw_only=True):
    """An operator keeps exactly so many instances of a model in a region; overrides its limit and rules pools out."""

    count: Count


class Weights(_OfEndpoint, frozen=True, kw_only=True):
    """A region that holds a model's weights."""


class Unfit(_OfCell, frozen=True, kw_only=True):
    """A GPU type in a region where a model's weights fit on no slot, and why: nothing new of it is placed there."""

    reason: str


class PoolShare(_OfCell, frozen=True, kw_only=True):
    """What a model in a region takes of one pool GPU, where that is known."""

    share: Positive


class PoolLoadOf(_OfCell, frozen=True, kw_only=True):
    """A model's latency model and requests in a region, from which its share of a pool GPU follows (pools.py)."""

    prefill_base_s: NotNegative
    prefill_per_token_s: NotNegative
    prefill_per_token2_s: NotNegative = 0.0
    decode_base_s: NotNegative
    decode_per_context_token_s: NotNegative
    decode_per_sequence_s: NotNegative = 0.0
    requests_per_s: NotNegative
    input_tokens: NotNegative
    input_tokens2: NotNegative | None = None
    output_tokens: NotNegative
    switch_s: NotNegative
    tbt_s: Positive = 0.1
    round_s: Positive = 12.0
    gather_s: NotNegative = 1.0
    gpus: Annotated[int, Meta(ge=1)] = 1


class PoolGpus(_Section, frozen=True, kw_only=True):
    """GPUs of a pool."""

    region: Name
    gpu: Name
    gpus: Count
    worker_gpus: Annotated[
        int, Meta(ge=0, description="of each worker of its slots; 0: those that models need there, if all need as many")
    ] = 0


class PooledNow(_OfCell, frozen=True, kw_only=True):
    """A model that is pooled in a region now."""


class Pool(_Section, frozen=True, kw_only=True):
    """Pools. What has neither an occupancy nor a load cannot be pooled."""

    on: bool = True
    fill: Annotated[float, Meta(gt=0, le=1, description="share of pool GPUs that may be occupied")] = 0.8
    occupancy: list[PoolShare] = []
    loads: list[PoolLoadOf] = []
    slots: Annotated[
        list[PoolGpus], Meta(description="GPUs of a slot: pools take slots whole; those of a worker where missing")
    ] = []
    most: Annotated[
        list[PoolGpus], Meta(description="GPUs of all its slots; where missing, all of the type there")
    ] = []
    present: Annotated[list[PoolGpus], Meta(description="GPUs of the pool now")] = []
    pooled: list[PooledNow] = []


class Solver(_Section, frozen=True, kw_only=True):
    """How to solve."""

    gap: Annotated[float, Meta(ge=0, lt=1, description="proven distance to the optimum that will do")] = 0.001
    time_limit_s: Positive = 30.0
    exact_cells_max: Annotated[int, Meta(ge=0, description="with more cells, prices solve it")] = 500


class Prices(_Section, frozen=True, kw_only=True):
    """What it costs to fall short, as ratios; see PlacementSettings."""

    unserved: Annotated[dict[Tier, NotNegative], Meta(description="by tier, all three")] = field(
        default_factory=lambda: {Tier.IW_F: 1000.0, Tier.IW_N: 500.0, Tier.NIW: 100.0}
    )
    minimum: NotNegative = 50.0
    pin: NotNegative = 2.0
    move: NotNegative = 1e-3


class Problem(_Section, frozen=True, kw_only=True):
    """A placement problem: the fleet, the coming hour, and how to place."""

    regions: Annotated[list[Name], Meta(min_length=1)]
    gpus: list[Gpu]
    models: list[Model]
    instance: list[Instance]
    present: list[CellCount] = []
    spot: Annotated[list[CellCount], Meta(description="donated instances: on GPUs here, free to take back")] = []
    demand: list[Demand]
    limits: list[Limit] = []
    pins: list[Pin] = []
    weights: Annotated[
        list[Weights] | UnsetType, Meta(description="without it: where instances are present or spot")
    ] = UNSET
    unfit: list[Unfit] = []
    epsilon: Annotated[float, Meta(ge=0, le=1, description="share of a peak that its own region must serve")] = 0.8
    pool: Pool | None = None
    solver: Solver = Solver()
    prices: Prices = Prices()


def decode(text: bytes | str) -> Problem:
    """The document in a JSON text.

    Raises:
        DocumentError: not JSON, or not of this schema.
    """
    try:
        return msgspec.json.decode(text, type=Problem)
    except msgspec.DecodeError as error:
        raise DocumentError(str(error)) from None


def schema() -> dict[str, Any]:
    """The JSON Schema of a problem."""
    return msgspec.json.schema(Problem)
