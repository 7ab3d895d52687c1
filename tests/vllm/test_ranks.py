"""A model that vLLM splits over two processes: the same tokens, constraints and all. One that dies or fails is seen."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import DeviceLostError
from dataplane.protocol.messages import Constraint
from ops.local.tiny_models import build_tiny_models
from tests.dataplane.constraints.answers import answers, asked, schema_constraint, spec
from tests.dataplane.engines.torch.drive import drain, request

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

pytestmark = pytest.mark.timeout(240)

SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_models(tmp_path_factory.mktemp("models"), ["tiny-phi3"])[0].path


def test_the_same_tokens_as_the_torch_engine_until_a_process_is_lost(
    make_engine: Callable[..., Any], folder: Path
) -> None:
    requests = [
        asked(0, schema_constraint(SCHEMA), max_tokens=30),
        asked(1, Constraint(kind="choice", definition='["yes", "no"]'), ignore_eos=True),
        asked(2, Constraint(kind="regex", definition="[0-9]{3}[a-z]*"), min_tokens=6, frequency_penalty=0.5),
        asked(3, schema_constraint(SCHEMA), temperature=0.0, max_tokens=30),
    ]
    free = [replace(one, request_id=f"free-{one.request_id}", constraint=None, max_tokens=20) for one in requests]
    ours = TorchEngine(TorchEngineSettings(weights_bytes=2**24, kv_bytes=2**24), time.monotonic)
    ours.load("a", spec(folder))
    expected = answers(ours, folder, [*requests, *free])
    ours.close()
    engine = make_engine(weights_bytes=2**24, kv_bytes=2**26, ranks=2, batch_max=8)
    engine.load("a", spec(folder))
    assert answers(engine, folder, [*requests, *free]) == expected
    [foreign] = answers(engine, folder, [asked(5, schema_constraint(SCHEMA), generated=(300,))])
    assert foreign.error is not None
    assert "does not match its constraint" in foreign.error

    engine.add(request("last", (5, 9, 33), max_tokens=100, ignore_eos=True))
    engine.step()
    [rank, *_] = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(DeviceLostError, match="a step of 2 processes failed"):
        drain(engine)


def test_a_step_that_fails_in_one_process_ends_the_worker(
    make_engine: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the other one, and says nothing: the limit of time ends that."""
    engine = make_engine(weights_bytes=2**24, kv_bytes=2**26, ranks=2, batch_max=8)
    engine.load("a", spec(folder))
    monkeypatch.setattr("vllm.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 3, raising=False)
    engine.models["model"].runner.engine.collective_rpc(fail_once)
    engine.add(request("one", (5, 9, 33)))
    with pytest.raises(DeviceLostError, match="a step of 2 processes failed"):
        drain(engine)


def fail_once(worker: Any) -> None:
    """Let the next step of rank 1 fail."""
    if worker.rank == 1:
        execute = worker.execute_model

        def fail(*_: Any, **__: Any) -> None:
            worker.execute_model = execute
            raise torch.OutOfMemoryError("injected")

        worker.execute_model = fail


def ranks_of(pid: int) -> list[int]:
    """The processes of ranks, by the name that vLLM gives them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if b"Worker" in Path(f"/proc/{one}/cmdline").read_bytes()]
