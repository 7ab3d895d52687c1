"""The fleet of the demo and of a first `tidepool up`: three regions, two GPU types, four tiny models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from dataplane.profile import load_gpu_profile
from ops.checkpoints import describe_checkpoint
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


class FleetClient:
    """The admin API, as far as setting up a fleet needs it."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=f"{url}/admin", headers={"Authorization": f"Bearer {key}"}, timeout=60.0)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def get(self, path: str, **params: Any) -> Any:
        """A JSON answer."""
        return _answer(self._client.get(path, params=params))

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """Write a resource."""
        return _answer(self._client.put(path, json=body))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Do something."""
        return _answer(self._client.post(path, json=body))

    def upload(self, path: str, text: str) -> Any:
        """Send CSV."""
        return _answer(self._client.post(path, content=text.encode(), headers={"Content-Type": "text/csv"}))

    def instances(self) -> list[dict[str, Any]]:
        """All live instances."""
        rows: list[dict[str, Any]] = []
        after: dict[str, str] = {}
        while True:
            page = self.get("/instances", limit=100, live_only=True, **after)
            rows += page["data"]
            if not page["has_more"]:
                return rows
            after = {"after": page["next"]}


def register_fleet(client: FleetClient, models: list[TinyModel]) -> None:
    """Tell the control plane of everything in this file. Saying it again changes nothing."""
    for position, region in enumerate(REGIONS):
        client.put(f"/regions/{region.name}", {"position": position})
    for gpu_type in TOKENS_PER_S:
        profile = load_gpu_profile(PROFILES / f"{gpu_type.lower()}.toml")
        client.put(
            f"/gpu-types/{gpu_type}",
            {"memory_bytes": profile.memory_bytes, "cost_per_hour": profile.cost_per_hour},
        )
    for model in models:
        client.put(f"/models/{model.name}", describe_checkpoint(model.path))
        for gpu_type, tokens_per_s in TOKENS_PER_S.items():
            client.put(
                "/profiles",
                {
                    "model": model.name,
                    "gpu_type": gpu_type,
                    "tokens_per_s": tokens_per_s,
                    "gpus": 1,
                    "load_time_s": LOAD_TIME_S,
                },
            )
        for region in REGIONS:
            client.put(
                "/endpoints",
                {
                    "model": model.name,
                    "region": region.name,
                    "instances_min": INSTANCES_MIN,
                    "instances_max": INSTANCES_MAX,
                },
            )


def is_empty(client: FleetClient) -> bool:
    """Whether nobody registered a region yet."""
    return not client.get("/regions")["data"]


def _answer(response: httpx.Response) -> Any:
    if response.is_error:
        problem = response.json() if "json" in response.headers.get("content-type", "") else {}
        detail = problem.get("detail", response.text[:200])
        raise RuntimeError(f"{response.request.method} {response.request.url.path}: {response.status_code} {detail}")
    return response.json()
