"""The fleet of the demo and of a first `tidepool up`: three regions, two GPU types, eight tiny models and
a pretrained one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from dataplane.memory.slabs import aligned
from dataplane.scheduling.profile import load_gpu_profile
from ops.client.api import Api
from ops.local.checkpoints import describe_checkpoint
from ops.local.pretrained import SMOLLM2
from ops.local.stack import LocalNode
from ops.local.tiny_models import TinyModel

PROFILES = Path(__file__).parents[1] / "profiles"
INSTANCES_MIN, INSTANCES_MAX = 1, 5
MEMORY_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class DemoRegion:
    """A region with one node of one GPU type, and its local time, which shifts its daily tide."""

    name: str
    gpu_type: str
    utc_offset_h: float


REGIONS = (
    DemoRegion(name="us-east", gpu_type="H800", utc_offset_h=-5),
    DemoRegion(name="us-central", gpu_type="H20", utc_offset_h=-6),
    DemoRegion(name="us-west", gpu_type="H800", utc_offset_h=-8),
)
POOL_REGION = REGIONS[0]
"""Its node is a shared GPU pool: one worker that serves every model and has memory for two."""
POOL_NODE = f"{POOL_REGION.name}-1"
POOL_RESIDENTS = 2
PRETRAINED_REGION = REGIONS[2]
"""Its node has memory for the pretrained model."""
LONG_TAIL = ("tiny-qwen2", "tiny-phi3", "tiny-gemma2", "tiny-smollm3")
"""Models with little demand, offered on the pool only."""
GPUS_PER_NODE, GPUS_OF_POOL = 8, 16
POOL_SLAB_BYTES = 128 * 2**10
# Input tokens per second of one instance at its SLO. A tiny model on a CPU stands for a model on these GPUs, so the
# figures are assumptions of the demo; `tidepool model add --tokens-per-s` sets real ones.
TOKENS_PER_S = {"H800": 2500.0, "H20": 1500.0}
LOAD_TIME_S = 600.0


def regions_of(model: str) -> tuple[DemoRegion, ...]:
    """Where a model is offered."""
    if model == SMOLLM2.name:
        return (PRETRAINED_REGION,)
    return (POOL_REGION,) if model in LONG_TAIL else REGIONS


def make_nodes(models: Sequence[TinyModel], pretrained: TinyModel | None = None) -> tuple[LocalNode, ...]:
    """A node for each region. The pool's node has memory for two models, another one also for `pretrained`."""
    more_bytes = 0 if pretrained is None else _pretrained_bytes(pretrained)
    others = (
        LocalNode(
            name=f"{region.name}-1",
            region=region.name,
            gpu_type=region.gpu_type,
            gpus=GPUS_PER_NODE,
            memory_bytes=MEMORY_BYTES + (more_bytes if region is PRETRAINED_REGION else 0),
        )
        for region in REGIONS
        if region is not POOL_REGION
    )
    return (_pool_node(models), *others)


def _pretrained_bytes(model: TinyModel) -> int:
    """Memory for its weights, which are stored in 16 bits and computed in 32, and as much for KV."""
    return 2 * 2 * (model.path / "model.safetensors").stat().st_size


def _pool_node(models: Sequence[TinyModel]) -> LocalNode:
    """A node with memory for the two largest models, and with too little KV memory for a third, even the smallest."""
    slabs = sorted(_slabs(model) for model in models)
    weights = sum(slabs[-POOL_RESIDENTS:])
    kv = sum(slabs[: POOL_RESIDENTS + 1]) - 1 - weights
    spare = 1  # half a slab for each share: rounding takes none away
    return LocalNode(
        name=POOL_NODE,
        region=POOL_REGION.name,
        gpu_type=POOL_REGION.gpu_type,
        gpus=GPUS_OF_POOL,
        memory_bytes=(weights + kv + spare) * POOL_SLAB_BYTES,
        settings={
            "kv_share": (kv + spare / 2) / (weights + kv + spare),
            "slab_bytes": POOL_SLAB_BYTES,
            "host_kv_bytes": MEMORY_BYTES,
        },
    )


def _slabs(model: TinyModel) -> int:
    """Slabs of its weights: each layer, an untied output, and the rest begin at a slab boundary."""
    parts: Counter[str] = Counter()
    for name, tensor in load_file(model.path / "model.safetensors").items():
        stage = re.match(r"model\.layers\.\d+|lm_head", name)
        parts[stage[0] if stage else "rest"] += aligned(tensor.nbytes)
    return sum(-(-size_bytes // POOL_SLAB_BYTES) for size_bytes in parts.values())


def register_fleet(api: Api, models: Sequence[TinyModel]) -> None:
    """Register everything in this file. Repeating it changes nothing."""
    for position, region in enumerate(REGIONS):
        api.put(f"/admin/regions/{region.name}", {"position": position})
    for gpu_type in TOKENS_PER_S:
        profile = load_gpu_profile(PROFILES / f"{gpu_type.lower()}.toml")
        costs = {"memory_bytes": profile.memory_bytes, "cost_per_hour": profile.cost_per_hour}
        api.put(f"/admin/gpu-types/{gpu_type}", costs)
    for model in models:
        api.put(f"/admin/models/{model.name}", describe_checkpoint(model.path))
        regions = [region.name for region in regions_of(model.name)]
        offer_model(api, model.name, TOKENS_PER_S, regions, INSTANCES_MIN, INSTANCES_MAX)


def offer_model(
    api: Api,
    model: str,
    tokens_per_s: Mapping[str, float],
    regions: Iterable[str],
    instances_min: int,
    instances_max: int,
) -> None:
    """Give a registered model a profile on each GPU type of `tokens_per_s`, and an endpoint in each region."""
    for gpu_type, rate in tokens_per_s.items():
        profile = {"model": model, "gpu_type": gpu_type, "tokens_per_s": rate, "gpus": 1, "load_time_s": LOAD_TIME_S}
        api.put("/admin/profiles", profile)
    for region in regions:
        limits = {"instances_min": instances_min, "instances_max": instances_max}
        api.put("/admin/endpoints", {"model": model, "region": region, **limits})


def live_instances(api: Api) -> list[dict[str, Any]]:
    """Every instance that is desired or draining."""
    rows: list[dict[str, Any]] = api.pages("/admin/instances", live_only=True)["data"]
    return rows


def is_empty(api: Api) -> bool:
    """Whether no region is registered."""
    return not api.get("/admin/regions")["data"]
