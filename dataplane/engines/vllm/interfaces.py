"""All use of vLLM beyond its public interface, and the versions for which that was tested.

Public, and used elsewhere in this package: `EngineArgs`, `LLMEngine` (`from_engine_args`, `add_request`, `step` and its
`RequestOutput`s, `abort_request`, `reset_prefix_cache`, `vllm_config.model_config`, `collective_rpc` with functions of
the worker, which use its `get_model` and `device`), `SamplingParams`, `LogitsProcessor`. Private, and used by
this module alone:

    engine.engine_core.engine_core.scheduler            load: .kv_cache_manager.usage, .kv_cache_config, and of
                                                        .requests[id]: .num_computed_tokens, .num_preemptions;
                                                        sleep: .needs_kv_cache_zeroing
    engine.engine_core.engine_core.batch_queue          turns: steps submitted, None without asynchronous scheduling
    vllm.v1.core.kv_cache_utils                         load: how many tokens the KV blocks hold
    .get_max_concurrency_for_kv_cache_config
    engine.engine_core._finalizer                       unload: the public way to end an engine takes
    .engine_core.model_executor, .scheduler: shutdown() torch.distributed from all engines of the process
    worker.model_runner.kv_caches                       sleep
    vllm.v1.worker.workspace._manager                   turns: scratch memory on a GPU, one per process; the engine
                                                        made last replaces it, one that ends removes it
    vllm.distributed.parallel_state._EP, and the        load: made with the first model of a process, and only if that
    functions that make it                              model has experts
    ModelRegistry.models[...].load_model_cls()          load: else vLLM imports itself anew to look at a model
    MultiprocExecutor(config, monitor_workers=False)    ranks on other hosts: what `vllm serve --headless` does there
    .start_worker_monitor(inline=True)
    vllm._custom_ops._supports_onednn                   sleep on a CPU: what oneDNN packed cannot leave

A version that was not tested is refused at start. To support one: run `make test-vllm` with it, and on a GPU
`pytest tests/gpu`, then add it to `version.TESTED`.
"""

import gc
import os
from collections.abc import MutableMapping
from typing import Any

from dataplane.engines.core.devices import VISIBLE, HostSpan, visible_gpus
from dataplane.engines.vllm.version import installed_version
from dataplane.protocol.errors import ModelLoadError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in our process, and steps when called
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # on GPUs it would be the default, and refuse our logits processor
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def prepare_process(
    device: str, environment: MutableMapping[str, str] = os.environ, *, ranks: int = 1, span: HostSpan | None = None
) -> None:
    """Set the environment that vLLM reads on import. For "cuda:N" the process sees only the Nth of its GPUs, and those
    after it that run a model together with it. `ranks`: of this host. Where the others are on other hosts, all of them
    use the network of these hosts, unless the environment names another.
    """
    environment.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
    if ranks > 1 or span is not None:
        environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process may have used its GPU already
    kind, _, index = device.partition(":")
    if kind == "cuda" and index:
        environment[VISIBLE] = visible_gpus(range(int(index), int(index) + ranks), environment)
    if span is not None:
        environment.setdefault("VLLM_HOST_IP", span.own_address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if name not in environment:
                environment[name] = _interface_of(span.own_address)


def _interface_of(address: str) -> str:
    """The network interface of this host that has an address.

    Raises:
        ModelLoadError: none has it.
    """
    import psutil  # noqa: PLC0415

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    raise ModelLoadError(f"no network interface of this host has the address {address}")


def start_ranks(arguments: Any) -> Any:
    """The executor of this host's ranks, which another host's engine commands. Returns when all ranks of all hosts have
    loaded their parts of the model.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415

    return MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)


def wait_for_ranks(executor: Any) -> None:
    """Until one of an executor's ranks has ended; then the others are ended."""
    executor.start_worker_monitor(inline=True)


def layout_settings() -> list[tuple[str, str]]:
    """vLLM's environment variables, which may select kernels and thereby the layout of weights."""
    return sorted((name, value) for name, value in os.environ.items() if name.startswith("VLLM_"))


def check_interfaces(engine: Any) -> None:
    """Check that an engine has all that this module uses.

    Raises:
        ModelLoadError: names what is missing.
    """
    try:
        right = {
            "kv_cache_manager.usage": isinstance(kv_usage(engine), float),
            "get_max_concurrency_for_kv_cache_config": kv_tokens(engine) > 0,
            "scheduler.requests": isinstance(_scheduler(engine).requests, dict),
            "_finalizer.detach": callable(engine.engine_core._finalizer.detach),  # noqa: SLF001
            "model_executor.shutdown": callable(engine.engine_core.engine_core.model_executor.shutdown),
            "kv_caches": engine.collective_rpc(lambda worker: len(kv_tensors(worker)))[0] > 0,
            "needs_kv_cache_zeroing": isinstance(_scheduler(engine).needs_kv_cache_zeroing, bool),
            "batch_queue": steps_in_flight(engine) == 0,
        }
        scratch()
    except AttributeError as error:
        raise ModelLoadError(_changed(str(error))) from error
    changed = [name for name, is_right in right.items() if not is_right]
    if changed:
        raise ModelLoadError(_changed(", ".join(changed)))


def computed_tokens(engine: Any, vllm_id: str) -> int:
    """Tokens of a request that have KV; 0 if it waits or has ended."""
    request = _scheduler(engine).requests.get(vllm_id)
    return 0 if request is None else int(request.num_computed_tokens)


def preemptions(engine: Any, vllm_id: str) -> int:
    """How often a request was preempted; 0 if it has ended."""
    request = _scheduler(engine).requests.get(vllm_id)
    return 0 if request is None else int(request.num_preemptions)


def overlaps(engine: Any) -> bool:
    """Whether an engine schedules asynchronously: it then submits a step before it returns the tokens of another."""
    return engine.engine_core.engine_core.batch_queue is not None


def steps_in_flight(engine: Any) -> int:
    """Steps that were submitted, and whose tokens no call has returned."""
    return len(engine.engine_core.engine_core.batch_queue or ())


def kv_usage(engine: Any) -> float:
    """The share of an engine's KV blocks that are in use."""
    usage: float = _scheduler(engine).kv_cache_manager.usage
    return usage


def kv_tokens(engine: Any) -> int:
    """The tokens whose KV fits in an engine's blocks, of requests as long as its context."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config  # noqa: PLC0415

    config = engine.vllm_config
    at_once = get_max_concurrency_for_kv_cache_config(config, _scheduler(engine).kv_cache_config)
    return int(at_once * config.model_config.max_model_len)


def kv_tensors(worker: Any) -> list[Any]:
    """The tensors that hold a worker's KV."""
    tensors: list[Any] = worker.model_runner.kv_caches
    return tensors


def keeps_kv_addresses(engine: Any) -> bool:
    """Whether an engine zeroes KV at recorded addresses, as models with recurrent layers require: it must not move."""
    zeroes: bool = _scheduler(engine).needs_kv_cache_zeroing
    return zeroes


def scratch() -> Any:
    """The scratch memory of the process: of the engine that was made last, unless `use_scratch` was called after."""
    from vllm.v1.worker import workspace  # noqa: PLC0415

    return workspace._manager  # noqa: SLF001


def use_scratch(manager: Any) -> None:
    """Make the next step use the scratch memory of its own engine."""
    from vllm.v1.worker import workspace  # noqa: PLC0415

    workspace._manager = manager  # noqa: SLF001


def end_engine(engine: Any) -> None:
    """End an engine and no other of the process: vLLM's own finalizer would end torch.distributed for all of them."""
    core = engine.engine_core
    core._finalizer.detach()  # noqa: SLF001
    core.engine_core.model_executor.shutdown()
    core.engine_core.scheduler.shutdown()
    gc.unfreeze()  # vLLM froze all objects when it started
    gc.collect()
    gc.freeze()  # the rest stays, and vLLM collects several times at each start


def import_model_class(architecture: str) -> None:
    """Import a model's class now. Unknown architectures are left to vLLM's own error."""
    from vllm import ModelRegistry  # noqa: PLC0415

    known = ModelRegistry.models.get(architecture)
    if known is not None:
        ModelRegistry.register_model(architecture, known.load_model_cls())


def make_expert_group() -> None:
    """Allow a model with experts after one without: vLLM makes their process group with the first model only."""
    from torch import distributed  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:  # noqa: SLF001
        world = parallel_state.get_world_group()
        backend = distributed.get_backend(world.device_group)
        parallel_state._EP = parallel_state.init_model_parallel_group(  # noqa: SLF001
            [[world.rank]], world.local_rank, backend, group_name="ep"
        )


def keep_weights_in_torch() -> None:
    """Keep matrices on a CPU as torch tensors, which can be offloaded, instead of oneDNN's packed format."""
    from vllm import _custom_ops  # noqa: PLC0415

    _custom_ops._supports_onednn = False  # noqa: SLF001


def _scheduler(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def _changed(what: str) -> str:
    return f"vLLM {installed_version()} is not as it was when it was tested: {what}"
