"""The fleet of the demo and of a first `tidepool up`: three regions, two GPU types, four tiny models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.profile import load_gpu_profile
from ops.checkpoints import describe_checkpoint
from ops.commands.api import Api
from ops.local import LocalNode
from ops.tiny_models import TinyModel

PROFILES = Path(__file__).parent / "profiles"
INSTANCES_MIN, INSTANCES_MAX = 1, 5
_MIB = 2**20


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
GPUS_PER_NODE = 8
NODES = tuple(
    LocalNode(
        name=f"{region.name}-1",
        region=region.name,
        gpu_type=region.gpu_type,
        gpus=GPUS_PER_NODE,
        memory_bytes=256 * _MIB,
    )
    for region in REGIONS
)
# Input tokens per second of one instance at its SLO. A tiny model on a CPU stands for a model on these GPUs, so the
# figures are assumptions of the demo; `tidepool model add --tokens-per-s` sets real ones.
TOKENS_PER_S = {"H800": 2500.0, "H20": 1500.0}
LOAD_TIME_S = 600.0


def register_fleet(api: Api, models: list[TinyModel]) -> None:
    """Tell the control plane of everything in this file. Saying it again changes nothing."""
    for position, region in enumerate(REGIONS):
        api.put(f"/admin/regions/{region.name}", {"position": position})
    for gpu_type in TOKENS_PER_S:
        profile = load_gpu_profile(PROFILES / f"{gpu_type.lower()}.toml")
        api.put(
            f"/admin/gpu-types/{gpu_type}",
            {"memory_bytes": profile.memory_bytes, "cost_per_hour": profile.cost_per_hour},
        )
    for model in models:
        api.put(f"/admin/models/{model.name}", describe_checkpoint(model.path))
        for gpu_type, tokens_per_s in TOKENS_PER_S.items():
            api.put(
                "/admin/profiles",
                {
                    "model": model.name,
                    "gpu_type": gpu_type,
                    "tokens_per_s": tokens_per_s,
                    "gpus": 1,
                    "load_time_s": LOAD_TIME_S,
                },
            )
        for region in REGIONS:
            api.put(
                "/admin/endpoints",
                {
                    "model": model.name,
                    "region": region.name,
                    "instances_min": INSTANCES_MIN,
                    "instances_max": INSTANCES_MAX,
                },
            )


def live_instances(api: Api) -> list[dict[str, Any]]:
    """Every instance that is wanted or still draining."""
    rows: list[dict[str, Any]] = api.pages("/admin/instances", live_only=True)["data"]
    return rows


def is_empty(api: Api) -> bool:
    """Whether nobody registered a region yet."""
    return not api.get("/admin/regions")["data"]
