"""What we use of vLLM, on GPUs too, is in the source of the version that is installed: names and arguments."""

import ast
import inspect
import socket
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
import pytest

from dataplane.engines.core.devices import HostSpan
from dataplane.engines.vllm import interfaces
from dataplane.protocol.errors import ModelLoadError

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
interfaces.prepare_process("cpu")


def set_by(kind: type) -> set[str]:
    """The names of a class, and of what its methods assign to `self`."""
    found: set[str] = set()
    for base in kind.__mro__[:-1]:
        found |= set(vars(base)) | set(vars(base).get("__annotations__", {}))
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(base) or base))):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                found |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                }
    return found


def given_in(module: ModuleType, called: str) -> list[tuple[int, set[str]]]:
    """How a function is called in a module: with how many arguments by place, and which by name."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    return [
        (len(call.args), {str(keyword.arg) for keyword in call.keywords})
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", None)) == called
    ]


def takes(function: Any, calls: list[tuple[int, set[str]]]) -> bool:
    """Whether a function takes all these calls, of which there are some."""
    for places, names in calls:
        inspect.signature(function).bind(*range(places), **dict.fromkeys(names))
    return bool(calls)


def test_what_we_call_is_there_and_takes_what_we_give() -> None:
    from vllm import EngineArgs, LLMEngine, PoolingParams, SamplingParams  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415

    from dataplane.engines.vllm import pooling, runner, sampling  # noqa: PLC0415

    assert takes(EngineArgs, given_in(runner, "EngineArgs"))
    assert takes(SamplingParams, given_in(sampling, "SamplingParams"))
    assert takes(PoolingParams, given_in(pooling, "PoolingParams"))
    assert takes(LLMEngine.from_engine_args, given_in(runner, "from_engine_args"))
    for method in ("add_request", "abort_request", "reset_prefix_cache", "collective_rpc"):
        bound = partial(getattr(LLMEngine, method), None)
        assert takes(bound, given_in(runner, method))
    for function in ("init_model_parallel_group", "get_world_group", "model_parallel_is_initialized"):
        assert takes(getattr(parallel_state, function), given_in(interfaces, function))
    assert takes(MultiprocExecutor, given_in(interfaces, "MultiprocExecutor"))
    assert takes(partial(MultiprocExecutor.start_worker_monitor, None), given_in(interfaces, "start_worker_monitor"))
    concurrency = "get_max_concurrency_for_kv_cache_config"
    assert takes(getattr(kv_cache_utils, concurrency), given_in(interfaces, concurrency))


def test_what_we_read_of_objects_is_set_by_their_classes() -> None:
    from vllm import ModelRegistry, _custom_ops  # noqa: PLC0415
    from vllm.config import CacheConfig, ModelConfig  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.model_executor.models.registry import _LazyRegisteredModel  # noqa: PLC0415
    from vllm.outputs import CompletionOutput, RequestOutput  # noqa: PLC0415
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
    from vllm.v1.engine.core_client import InprocClient  # noqa: PLC0415
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415
    from vllm.v1.worker import workspace  # noqa: PLC0415
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    read: dict[type, set[str]] = {
        LLMEngine: {"engine_core", "vllm_config", "step"},
        InprocClient: {"engine_core", "_finalizer"},
        EngineCore: {"scheduler", "model_executor"},
        UniProcExecutor: {"shutdown"},
        Scheduler: {"requests", "kv_cache_manager", "kv_cache_config", "needs_kv_cache_zeroing", "shutdown"},
        KVCacheManager: {"usage"},
        Request: {"num_computed_tokens", "num_preemptions"},
        RequestOutput: {"request_id", "outputs", "finished"},
        CompletionOutput: {"token_ids", "finish_reason"},
        ModelConfig: {"max_model_len", "get_vocab_size"},
        CacheConfig: {"kv_cache_memory_bytes", "gpu_memory_utilization"},
        Worker: {"get_model", "device", "model_runner"},
        GPUModelRunner: {"kv_caches", "get_model"},
        _LazyRegisteredModel: {"load_model_cls"},
        type(ModelRegistry): {"models", "register_model"},
    }
    missing = {kind.__name__: names - set_by(kind) for kind, names in read.items()}
    assert not {name: lacking for name, lacking in missing.items() if lacking}
    assert hasattr(workspace, "_manager")
    assert hasattr(parallel_state, "_EP")
    assert hasattr(_custom_ops, "_supports_onednn")


def test_what_we_set_in_the_environment_is_read() -> None:
    from vllm import envs  # noqa: PLC0415

    environment: dict[str, str] = {}
    interfaces.prepare_process("cpu", environment, ranks=2)
    ours = {name for name in environment if name.startswith("VLLM_")}
    assert ours <= set(envs.environment_variables)
    assert {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_WORKER_MULTIPROC_METHOD"} <= ours
    assert "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" in envs.environment_variables, "documents name it"


def test_ranks_of_several_hosts_use_the_network_of_these_hosts() -> None:
    span = HostSpan(hosts=2, host=1, address="10.0.0.1", port=9, own_address="127.0.0.1")
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    interfaces.prepare_process("cpu", environment, span=span)
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert environment["NCCL_SOCKET_IFNAME"] == "ib0", "as the operator says"
    with pytest.raises(ModelLoadError, match=r"no network interface of this host has the address 192\.0\.2\.1"):
        interfaces.prepare_process("cpu", {}, span=msgspec.structs.replace(span, own_address="192.0.2.1"))
