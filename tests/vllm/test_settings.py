"""How much memory KV has, and how a slot of several GPUs is set up."""

import json
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.core.devices import HostSpan
from dataplane.engines.vllm.interfaces import prepare_process
from dataplane.engines.vllm.settings import VllmEngineSettings
from dataplane.protocol.errors import ModelLoadError

runner = pytest.importorskip(
    "dataplane.engines.vllm.runner",
    reason="vLLM has an environment of its own: make test-vllm",
    exc_type=ModuleNotFoundError,
)

GIVEN: dict[str, Any] = {"weights_bytes": 40 * 10**9, "kv_bytes": 40 * 10**9}


def test_kv_of_the_only_model_gets_what_its_weights_leave() -> None:
    alone = VllmEngineSettings(device="cuda:0", spare_to_kv=True, **GIVEN)
    assert alone.pool_bytes(16 * 10**9) == (80 - 8 - 16) * 10**9, "less the tenth that steps need"
    assert alone.pool_bytes(39 * 10**9) == 40 * 10**9, "never less than its share"
    assert VllmEngineSettings(spare_to_kv=True, **GIVEN).pool_bytes(16 * 10**9) == 64 * 10**9
    assert VllmEngineSettings(device="cuda:0", **GIVEN).pool_bytes(16 * 10**9) == 40 * 10**9


def test_models_that_take_turns_share_kv_memory() -> None:
    both = VllmEngineSettings(models_max=4, awake_max=2, **GIVEN)
    assert both.pool_bytes(10**9) == 20 * 10**9
    with pytest.raises(ValueError, match="spare_to_kv needs models_max of 1, got 4"):
        VllmEngineSettings(models_max=4, spare_to_kv=True, **GIVEN)


def test_a_slot_of_several_gpus_splits_one_model_and_no_more() -> None:
    with pytest.raises(ValueError, match="ranks above 1 need models_max of 1, got 2"):
        VllmEngineSettings(device="cuda:0", ranks=2, models_max=2, **GIVEN)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        VllmEngineSettings(device="cuda:0", ranks=0, **GIVEN)


def test_vllm_is_asked_to_split_a_model_over_the_gpus_of_its_slot(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 28}))
    one, four = (VllmEngineSettings(device="cuda:0", ranks=ranks, **GIVEN) for ranks in (1, 4))
    asked = runner.engine_arguments("m", tmp_path, four, "generate", 7 * 2**30)
    split = (asked.tensor_parallel_size, asked.distributed_executor_backend, asked.kv_cache_memory_bytes)
    assert split == (4, "mp", 7 * 2**30), "the KV memory is of each GPU"
    alone = runner.engine_arguments("m", tmp_path, one, "generate", 7 * 2**30)
    assert (alone.tensor_parallel_size, alone.distributed_executor_backend, alone.nnodes) == (1, None, 1)
    span = HostSpan(hosts=2, host=1, address="10.0.0.1", port=5000, own_address="10.0.0.2")
    spanning = VllmEngineSettings(device="cuda:0", ranks=4, span=span, **GIVEN)
    second = runner.engine_arguments("m", tmp_path, spanning, "generate", 7 * 2**30)
    assert (second.tensor_parallel_size, second.nnodes, second.node_rank) == (4, 2, 1)
    assert (second.master_addr, second.master_port) == ("10.0.0.1", 5000)
    eight = VllmEngineSettings(device="cuda:0", ranks=8, **GIVEN)
    with pytest.raises(ModelLoadError, match="m: num_attention_heads=28 of its config cannot be divided among 8 GPUs"):
        runner.engine_arguments("m", tmp_path, eight, "generate", 7 * 2**30)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_attention_heads": 6}}))
    with pytest.raises(ModelLoadError, match="num_attention_heads=6"):
        runner.engine_arguments("m", tmp_path, four, "generate", 7 * 2**30)


def test_vllm_sees_all_gpus_of_its_slot() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    prepare_process("cuda:0", environment, ranks=4)
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    with pytest.raises(ModelLoadError, match="device cuda:4 is not among CUDA_VISIBLE_DEVICES"):
        prepare_process("cuda:0", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ranks=5)
