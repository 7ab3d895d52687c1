"""A vLLM model that is put to sleep, or whose step fails, on a fake of vLLM's engine."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dataplane.engines.vllm import interfaces
from dataplane.engines.vllm.settings import VllmEngineSettings
from dataplane.protocol.errors import DeviceLostError, ModelLoadError


class StandIn:
    """As much of an engine as a runner and `check_interfaces` ask for. `lets_go`: whether its KV can be reset."""

    def __init__(self) -> None:
        self.lets_go = True
        self.called: list[str] = []
        model_config = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 16)
        self.vllm_config = SimpleNamespace(model_config=model_config)
        scheduler = SimpleNamespace(
            requests={}, needs_kv_cache_zeroing=False, kv_cache_manager=SimpleNamespace(usage=0.5), kv_cache_config=None
        )
        executor = SimpleNamespace(shutdown=lambda: None)
        core = SimpleNamespace(scheduler=scheduler, model_executor=executor, batch_queue=None)
        self.engine_core = SimpleNamespace(engine_core=core, _finalizer=SimpleNamespace(detach=lambda: None))

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        self.called.append("reset")
        return self.lets_go

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        self.called.append(function.__name__)
        return [1]

    def step(self) -> list[Any]:
        raise RuntimeError("Worker failed with error 'out of memory'")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(interfaces, "kv_tokens", lambda engine: 64)
    monkeypatch.setattr(interfaces, "scratch", lambda: None)
    return StandIn()


@pytest.fixture
def make_runner(engine: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[int], Any]:
    """Makes a runner of so many processes."""
    vllm, logprobs = ModuleType("vllm"), ModuleType("vllm.logprobs")
    lora, lora_request = ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    for name in ("EngineArgs", "LLMEngine", "PoolingParams", "PoolingRequestOutput", "SamplingParams"):
        setattr(vllm, name, object)
    logprobs.Logprob = object
    lora_request.LoRARequest = object
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.logprobs", logprobs)
    monkeypatch.setitem(sys.modules, "vllm.lora", lora)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", lora_request)
    monkeypatch.delitem(sys.modules, "dataplane.engines.vllm.adapters", raising=False)
    monkeypatch.delitem(sys.modules, "dataplane.engines.vllm.runner", raising=False)
    module = importlib.import_module("dataplane.engines.vllm.runner")
    monkeypatch.setitem(sys.modules, "dataplane.engines.vllm.runner", module)  # so that it is forgotten again
    monkeypatch.setattr(module, "engine_arguments", lambda *_: None)
    monkeypatch.setattr(module, "_build", lambda *_: engine)

    def make(ranks: int) -> Any:
        settings = VllmEngineSettings(weights_bytes=1, kv_bytes=1, ranks=ranks)
        return module.Runner("tide", tmp_path, settings, None, kv_bytes=1)

    return make


@pytest.fixture
def runner(engine: StandIn, make_runner: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make_runner(1)
    monkeypatch.setattr(made, "_copy", object())
    engine.called.clear()
    return made


def test_a_model_leaves_once_its_kv_was_reset(engine: StandIn, runner: Any) -> None:
    runner.sleep()
    assert engine.called == ["reset", "offload"]
    assert not runner.awake


def test_a_model_whose_kv_cannot_be_reset_stays_and_says_so(engine: StandIn, runner: Any) -> None:
    engine.lets_go = False
    with pytest.raises(ModelLoadError, match="tide: vLLM did not reset its KV cache"):
        runner.sleep()
    assert engine.called == ["reset"]
    assert runner.awake


def test_a_step_that_fails_in_one_of_several_processes_loses_them_all(
    make_runner: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "use_scratch", lambda manager: None)
    with pytest.raises(RuntimeError, match=r"^Worker failed"):
        make_runner(1).step()
    with pytest.raises(DeviceLostError, match=r"tide: a step of 2 processes failed: .*out of memory"):
        make_runner(2).step()


def test_an_interface_that_changed_is_named(engine: StandIn) -> None:
    interfaces.check_interfaces(engine)
    engine.engine_core.engine_core.scheduler.kv_cache_manager.usage = "half"
    with pytest.raises(ModelLoadError, match=r"not as it was when it was tested: kv_cache_manager\.usage"):
        interfaces.check_interfaces(engine)
    del engine.engine_core.engine_core.batch_queue
    with pytest.raises(ModelLoadError, match=r"not as it was when it was tested: .*batch_queue"):
        interfaces.check_interfaces(engine)
    del engine.engine_core._finalizer
    with pytest.raises(ModelLoadError, match=r"not as it was when it was tested: .*_finalizer"):
        interfaces.check_interfaces(engine)
