"""The demo's nodes: the pool has memory for any two of the models, and for no three."""

import pytest
import torch

from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.engines.torch.model.skeleton import build_skeleton
from ops.local.sample_fleet import (
    GPUS_OF_POOL,
    LONG_TAIL,
    POOL_NODE,
    POOL_REGION,
    POOL_SLAB_BYTES,
    REGIONS,
    make_nodes,
    regions_of,
)
from ops.local.tiny_models import RECIPES, TinyModel, build_tiny_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    return build_tiny_models(tmp_path_factory.mktemp("models"))


def test_the_pool_holds_two_models_whichever_they_are(models: list[TinyModel]) -> None:
    node = next(node for node in make_nodes(models) if node.name == POOL_NODE)
    slot = WorkerSettings(gpus=node.gpus, memory_bytes=node.memory_bytes)
    names = {"node": node.name, "region": node.region, "gpu_type": node.gpu_type, "node_key": "no matter"}
    agent = AgentSettings.model_validate({**names, "slots": (slot,), **node.settings})
    needed = sorted(
        build_skeleton(model.path, torch.float32, torch.device("cpu")).slabs(POOL_SLAB_BYTES) for model in models
    )
    weights_slabs = agent.weights_bytes(slot) // POOL_SLAB_BYTES
    kv_slabs = agent.kv_bytes(slot) // POOL_SLAB_BYTES
    assert weights_slabs == needed[-1] + needed[-2]
    assert weights_slabs + kv_slabs == sum(needed[:3]) - 1
    assert kv_slabs > len(models)  # or they could not even begin at once


def test_the_pool_is_offered_everything_and_the_others_what_is_asked_for_often(models: list[TinyModel]) -> None:
    assert {name for name in RECIPES if regions_of(name) == (POOL_REGION,)} == set(LONG_TAIL)
    assert {regions_of(name) for name in RECIPES if name not in LONG_TAIL} == {REGIONS}
    assert [node.region for node in make_nodes(models)] == [region.name for region in REGIONS]
    assert len(RECIPES) <= GPUS_OF_POOL
