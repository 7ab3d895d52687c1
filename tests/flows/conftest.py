"""A whole stack of real processes on the replay engine, shared by the tests of a module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import openai
import pytest

from ops.client.api import Api, open_api
from ops.local.ports import free_port
from ops.local.replay_stack import replayed_model
from ops.local.sample_fleet import PROFILES, REGIONS, TOKENS_PER_S, DemoRegion, live_instances, offer_model
from ops.local.stack import LocalNode, LocalStack
from tests.flows.waiting import wait_until

MODELS = ("tide", "ebb", "flood")
REPLAY_NODES = tuple(
    LocalNode(
        name=f"{region.name}-1",
        region=region.name,
        gpu_type=region.gpu_type,
        gpus=8,
        memory_bytes=64 * 2**20,
        engine="replay",
        profile=PROFILES / f"{region.gpu_type.lower()}.toml",
    )
    for region in REGIONS
)
StackMaker = Callable[..., AbstractContextManager[LocalStack]]


@contextmanager
def replay_stack(
    home: Path, nodes: tuple[LocalNode, ...] = REPLAY_NODES, *, environment: Mapping[str, str] | None = None
) -> Iterator[LocalStack]:
    """A running stack whose loops turn quickly. `environment`: more of its settings."""
    quick = {"TIDEPOOL_SCALE_EVERY_S": "1", "TIDEPOOL_EXPIRE_EVERY_S": "2", "TIDEPOOL_NIW_LEASE_S": "6"}
    lines: list[str] = []
    with LocalStack(
        home, free_port(), nodes, environment=quick | dict(environment or {}), report=lines.append
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def make_stack() -> StackMaker:
    return replay_stack


def register(
    admin: Api, models: tuple[str, ...] = MODELS, regions: tuple[DemoRegion, ...] = REGIONS, *, instances_min: int = 1
) -> None:
    """A small fleet for the replay engine: no checkpoint is read."""
    for position, region in enumerate(regions):
        admin.put(f"/admin/regions/{region.name}", {"position": position})
    for gpu_type in TOKENS_PER_S:
        admin.put(f"/admin/gpu-types/{gpu_type}", {"memory_bytes": 80 * 2**30, "cost_per_hour": 2.0})
    for model in models:
        admin.put(f"/admin/models/{model}", replayed_model(model, 512))
        offer_model(admin, model, TOKENS_PER_S, [region.name for region in regions], instances_min, 4)


def wait_ready(admin: Api, count: int) -> None:
    """Until `count` instances are ready."""
    wait_until(
        lambda: sum(row["state"] == "ready" for row in live_instances(admin)) >= count, f"{count} instances ready"
    )


def wait_seen(client: openai.OpenAI, model: str) -> None:
    """Until the gateway, which reads what nodes report a few times a second, knows a ready instance of the model."""
    wait_until(lambda: (client.models.retrieve(model).model_extra or {})["state"] == "ready", "the gateway sees it")


def admin_of(stack: LocalStack) -> AbstractContextManager[Api]:
    """The admin API."""
    return open_api(stack.url, stack.keys["admin"])


def client_of(stack: LocalStack) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.keys["client"], max_retries=8)
