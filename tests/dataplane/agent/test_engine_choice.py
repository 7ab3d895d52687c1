"""Which engine an instance runs on, and the errors where it cannot."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from dataplane.agent.host_files import HostFiles
from dataplane.agent.node import Agent
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.agent.workers import configure, engine_of, worker_environment
from dataplane.engines.core.devices import HostSpan
from dataplane.engines.interface import EngineRequest
from dataplane.engines.vllm import interfaces
from dataplane.engines.vllm.settings import VllmEngineSettings
from dataplane.engines.vllm.version import TESTED
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import BaseModel, DesiredInstance, EngineChoice, EngineKind
from dataplane.worker.engines import make_engine
from tests.dataplane.replay_node import desired, install_vllm, instance, model, settings, workers
from tests.event_loop import asynchronous


def asking(engine: EngineChoice, instance_id: str = "i1", **changes: Any) -> DesiredInstance:
    return instance(instance_id, name=f"model-{instance_id}", engine=engine, **changes)


@pytest.mark.parametrize(
    ("node", "model", "dedicated", "pooled"),
    [
        ("torch", "auto", "torch", "torch"),
        ("torch", "vllm", "vllm", "vllm"),
        ("vllm", "auto", "vllm", "torch"),
        ("vllm", "torch", "torch", "torch"),
        ("replay", "vllm", "replay", "replay"),
    ],
)
def test_the_model_decides_then_the_node_and_pools_run_on_torch_unless_vllm_is_named(
    node: EngineKind, model: EngineChoice, dedicated: EngineKind, pooled: EngineKind
) -> None:
    assert engine_of(asking(model), node) == dedicated
    assert engine_of(msgspec.structs.replace(asking(model), gpus=0), node) == pooled


def test_an_adapter_with_gpus_of_its_own_runs_where_its_base_would() -> None:
    base = BaseModel(name="base", path="/base", weights_bytes=1)
    adapter = msgspec.structs.replace(asking("auto").model, base=base)
    wanted = msgspec.structs.replace(asking("auto"), model=adapter)
    assert [engine_of(wanted, default) for default in ("torch", "vllm", "replay")] == ["torch", "vllm", "replay"]


def test_a_worker_may_be_silent_for_longer_than_between_its_reports() -> None:
    assert settings(worker_silent_max_s=0).worker_silent_max_s == 0
    with pytest.raises(ValidationError, match="worker_silent_max_s must be 0 or at least 5, not 2"):
        settings(worker_silent_max_s=2.0)


def test_memory_for_adapters_is_asked_of_vllm_and_does_not_go_with_models_that_sleep(tmp_path: Path) -> None:
    given = settings(engine="torch", profile=None, vllm_adapters_max=4, vllm_adapter_rank_max=32)
    asked = configure(given, 0, None, HostFiles(settings(cache_dir=tmp_path), "boot"), "vllm")
    assert (asked.vllm_adapters_max, asked.vllm_adapter_rank_max) == (4, 32)
    with pytest.raises(ValidationError, match="vllm_adapters_max: must be 0 where vllm_models_max is 2"):
        settings(engine="torch", profile=None, vllm_adapters_max=4, vllm_models_max=2)


def errors_of(*instances: DesiredInstance, **changes: Any) -> dict[str, str | None]:
    """The errors of instances on a node whose workers never start; the first is desired before the others."""

    async def scenario() -> dict[str, str | None]:
        agent = Agent(settings(engine="torch", profile=None, **changes), boot_id="boot")
        agent.apply(desired(1, instances[0]))
        agent.apply(desired(2, *instances))
        return await errors_in_the_end(agent)

    return asyncio.run(scenario())


async def errors_in_the_end(agent: Agent) -> dict[str, str | None]:
    async with asyncio.timeout(60):
        while not all(report.error for report in agent.reports()):
            agent.changed.clear()
            await agent.changed.wait()
    return {report.instance_id: report.error for report in agent.reports()}


def test_a_node_without_vllm_says_so() -> None:
    assert "vLLM is not installed on this node" in str(errors_of(asking("vllm"))["i1"])
    with pytest.raises(ValidationError, match="vLLM is not installed"):
        settings(engine="vllm", profile=None)


def test_a_version_that_was_not_tested_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm("0.99.0", tmp_path, monkeypatch)
    assert "vLLM 0.99.0 is installed, tested are 0.32.0" in str(errors_of(asking("vllm"))["i1"])
    with pytest.raises(ValidationError, match=r"vLLM 0\.99\.0 is installed"):
        settings(engine="vllm", profile=None)


def test_a_kv_pressure_action_that_vllm_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    refusal = "kv_pressure must be auto or recompute for vLLM, which handles it itself, not remap"
    assert errors_of(asking("vllm"), kv_pressure="remap")["i1"] == refusal
    with pytest.raises(ValidationError, match=refusal):
        settings(engine="vllm", profile=None, kv_pressure="remap")
    assert settings(engine="vllm", profile=None, kv_pressure="recompute").engine == "vllm"


@pytest.mark.parametrize("mixed", [False, True])
def test_a_replay_prefills_beside_the_batch_if_the_settings_say_so(*, mixed: bool) -> None:
    """A request that decodes makes a token in the step that completes another's prefill."""
    node = settings(mixed_batches=mixed, replay_speed=1e6)
    engine = make_engine(configure(node, 0, None, HostFiles(node, "boot"), "replay"))
    engine.load("i1", model(context_tokens=10**6))

    def ask(request_id: str) -> EngineRequest:
        return EngineRequest(
            request_id=request_id, instance_id="i1", tier="IW-N", prompt=(1,) * 10, max_tokens=100, ignore_eos=True
        )

    engine.add(ask("old"))
    while not any(output.token_ids for output in engine.step()):
        pass
    engine.add(ask("new"))
    made: set[str] = set()
    while "new" not in made:
        made = {output.request_id for output in engine.step()}
    assert made == ({"old", "new"} if mixed else {"new"})


@pytest.mark.parametrize("time_slices", ["rounds", "deadlines"])
def test_a_worker_divides_its_time_as_the_settings_say(time_slices: str) -> None:
    node = settings(time_slices=time_slices)
    assert configure(node, 0, None, HostFiles(node, "boot"), "replay").turns.time_slices == time_slices
    assert settings().turns.time_slices == "deadlines"


def test_a_replay_uses_the_kv_pressure_action_of_the_settings() -> None:
    """One token fits beside the first request: the next is not admitted, and nobody is swapped."""
    node = settings(kv_pressure="refuse", replay_speed=1e6)
    engine = make_engine(configure(node, 0, None, HostFiles(node, "boot"), "replay"))
    engine.load("i1", model(context_tokens=10**6))
    (load,) = engine.stats().instances
    for request_id in ("r1", "r2"):
        engine.add(
            EngineRequest(
                request_id=request_id,
                instance_id="i1",
                tier="IW-N",
                prompt=(1,) * (load.kv_tokens_max - 4),
                max_tokens=3,
            )
        )
    while engine.has_work():
        engine.step()
    pool = engine.stats().pool
    assert pool is not None
    assert pool.pressure_actions["refuse"] > 0
    assert pool.pressure_actions.keys() <= {"refuse", "wait"}


def test_a_worker_runs_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    errors = errors_of(asking("vllm"), asking("torch", "i2"))
    assert "/nowhere" in str(errors["i1"]), "its checkpoint is read next"
    assert errors["i2"] == "worker 0 runs vllm for other models; model-i2 wants torch"


def test_workers_in_a_group_run_no_vllm() -> None:
    errors = errors_of(asking("vllm"), together=True, slots=workers(1, 1))
    assert errors["i1"] == "worker 0 is in a group with others; vLLM needs a worker of its own"
    assert errors != errors_of(asking("vllm"), together=True), "there are no others"


def test_workers_of_several_ranks_share_no_slot_on_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    two = (WorkerSettings(gpus=2, ranks=2, memory_bytes=2**30),)
    errors = errors_of(asking("vllm"), slots=two, vllm_models_max=2)
    assert errors["i1"] == "worker 0: gpus must be 1 for vLLM where vllm_models_max is above 1, got 2"
    assert "/nowhere" in str(errors_of(asking("vllm"), slots=two, vllm_models_max=1)["i1"])


def test_vllm_runs_a_model_on_all_gpus_of_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = settings().model_dump(exclude={"engine", "profile", "slots"}) | {"device": "cuda", "engine": "vllm"}
    slots = (WorkerSettings(gpus=1, memory_bytes=80 * 2**30), WorkerSettings(gpus=4, memory_bytes=320 * 2**30))
    agent = AgentSettings(**given, slots=slots)
    asked = configure(agent, 1, None, HostFiles(agent, "boot"), "vllm")
    assert (asked.ranks, asked.weights_bytes, asked.kv_bytes) == (4, 40 * 2**30, 40 * 2**30), "each GPU's share"
    assert worker_environment(agent, 1, {})["CUDA_VISIBLE_DEVICES"] == "1,2,3,4"
    with pytest.raises(ValidationError, match=r"slots.1: gpus must be 1 for vLLM where vllm_models_max is above 1"):
        AgentSettings(**given | {"vllm_models_max": 2}, slots=slots)


def test_a_gpu_node_with_a_slot_of_several_prefers_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    given = settings().model_dump(exclude={"engine", "profile", "slots"}) | {"device": "cuda"}
    one, two = (WorkerSettings(gpus=gpus, memory_bytes=2**30) for gpus in (1, 2))
    assert AgentSettings(**given, slots=(one,)).engine == "vllm"
    assert AgentSettings(**given, slots=(one, two)).engine == "torch"


@asynchronous
async def test_an_instance_follows_its_engine_where_the_worker_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    agent = Agent(settings(engine="torch", profile=None), boot_id="boot")
    (worker,) = agent.workers

    async def errors(generation: int, first: EngineChoice, second: EngineChoice) -> list[str]:
        agent.apply(desired(generation, asking(first), asking(second, "i2")))
        return [str(error) for error in (await errors_in_the_end(agent)).values()]

    assert all("/nowhere" in error for error in await errors(1, "auto", "torch"))
    moved, stayed = await errors(2, "vllm", "torch")
    assert moved == "worker 0 runs torch for other models; model-i1 wants vllm"
    assert "/nowhere" in stayed
    assert all("/nowhere" in error for error in await errors(3, "vllm", "vllm"))
    assert worker.engine == "vllm"


def test_vllm_is_preferred_where_gpus_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preferred(**changes: Any) -> EngineKind:
        values = settings().model_dump(include={"node", "region", "gpu_type", "slots", "node_key"})
        return AgentSettings(**values | changes).engine

    assert preferred(device="cuda") == "torch", "it is not installed here"
    install_vllm(TESTED[0], tmp_path, monkeypatch)
    assert [preferred(device=device) for device in ("cpu", "cuda", "cuda:1")] == ["torch", "vllm", "vllm"]
    assert preferred(device="cuda", engine="torch") == "torch"
    assert preferred(device="cuda", split=True) == "torch", "vLLM has no prefill and decode workers"
    assert preferred(device="cuda", together=True) == "torch", "nor groups of workers"
    assert preferred(device="cuda", kv_pressure="remap") == "torch"


def test_a_gpu_is_named_as_the_process_sees_it() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
    interfaces.prepare_process("cuda:1", environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0", "it refuses our logits processor"


def test_an_interface_is_looked_up_only_where_the_environment_names_none() -> None:
    span = HostSpan(hosts=2, host=1, address="192.0.2.1", port=9, own_address="192.0.2.1")
    environment = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}
    interfaces.prepare_process("cpu", environment, span=span)
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib0")
    with pytest.raises(ModelLoadError, match=r"no network interface of this host has the address 192\.0\.2\.1"):
        interfaces.prepare_process("cpu", {"GLOO_SOCKET_IFNAME": "eth7"}, span=span)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="awake_max must be at most models_max=1, got 2"):
        VllmEngineSettings(weights_bytes=1, kv_bytes=1, awake_max=2)
    with pytest.raises(ValueError, match="kv_bytes must be at least 1"):
        VllmEngineSettings(weights_bytes=1, kv_bytes=0)
    assert VllmEngineSettings(weights_bytes=1, kv_bytes=1, device="cuda").eager is False
    assert VllmEngineSettings(weights_bytes=1, kv_bytes=1, device="cuda", models_max=2).eager is True


@pytest.mark.parametrize(
    ("node", "asked", "runs_on"),
    [("vllm", "auto", "torch"), ("torch", "auto", "torch"), ("vllm", "vllm", "vllm"), ("replay", "auto", "replay")],
)
def test_a_model_that_embeds_runs_on_torch_unless_vllm_is_named(
    node: EngineKind, asked: EngineChoice, runs_on: EngineKind
) -> None:
    assert engine_of(asking(asked, task="embed"), node) == runs_on
