"""Asynchronous scheduling changes no token. vLLM has it on GPUs alone, so a CPU is made to pass for one here: steps are
submitted ahead and tokens arrive a step later, as there, although nothing runs at the same time.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.vllm import interfaces
from dataplane.engines.vllm.settings import VllmEngineSettings
from dataplane.protocol.messages import Constraint
from ops.local.tiny_models import build_tiny_models
from tests.dataplane.constraints.answers import answers, asked, schema_constraint, spec
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.test_greedy import prompts
from tests.dataplane.engines.torch.test_sampling import LOGPROBS, MAX_TOKENS
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of
from tests.vllm.test_constraints import SCHEMA

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

Checkpoint = Callable[[str], Path]
MakeEngine = Callable[..., Any]


class Stream:
    """Of a device whose work is done when it is submitted."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: "Stream") -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def _asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces.prepare_process("cpu")
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    check = CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = vllm_config.model_config.runner_type == "generate"

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_keep))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


def loaded(make_engine: MakeEngine, folder: Path, **changes: Any) -> Any:
    engine = make_engine(prefill_tokens_per_step_max=7, **changes)
    engine.load("a", spec_of("model", folder))
    assert interfaces.overlaps(engine.models["model"].runner.engine)
    return engine


def test_tokens_and_scores_are_those_of_the_torch_engine(checkpoint: Checkpoint, make_engine: MakeEngine) -> None:
    given = prompts(VOCABULARY)
    sampled = {"max_tokens": MAX_TOKENS, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "logprobs": LOGPROBS}
    penalized = {**sampled, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((5, 2.0),)}
    asked = [request(f"g{name}", prompt, max_tokens=MAX_TOKENS) for name, prompt in given.items()]
    asked += [request(f"s{name}", prompt, seed=len(prompt), **sampled) for name, prompt in given.items()]
    asked += [request(f"p{name}", prompt, seed=len(prompt), **penalized) for name, prompt in given.items()]
    asked += [request("one", given["r6"], max_tokens=1, temperature=1.0, seed=4)]
    later = {0: asked[:2], 3: asked[2:5], 6: asked[5:]}
    ours = TorchEngine(TorchEngineSettings(weights_bytes=2**24, kv_bytes=2**22), time.monotonic)
    ours.load("a", spec_of("model", checkpoint("llama")))
    expected = drain(ours, later=later)
    ours.close()
    made = drain(loaded(make_engine, checkpoint("llama")), later=later)
    assert made.errors == {}
    assert made.tokens == expected.tokens
    assert made.finished == expected.finished
    for name, scores in expected.scores.items():
        assert [one.logprob for one in made.scores[name]] == pytest.approx([one.logprob for one in scores], abs=1e-3)


def test_constrained_answers_are_those_of_the_torch_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The step that is in flight when an answer ends asks its constraint for nothing."""
    folder = build_tiny_models(tmp_path, ["tiny-llama"])[0].path
    requests = [
        asked(0, schema_constraint(SCHEMA), max_tokens=200),
        asked(1, Constraint(kind="choice", definition='["yes", "no"]'), ignore_eos=True),
        asked(2, Constraint(kind="regex", definition="[0-9]{3}[a-z]*"), min_tokens=6, frequency_penalty=0.5),
        asked(3, schema_constraint(SCHEMA), temperature=0.0),
    ]
    ours = TorchEngine(TorchEngineSettings(weights_bytes=2**24, kv_bytes=2**24), time.monotonic)
    ours.load("a", spec(folder))
    expected = answers(ours, folder, requests)
    ours.close()
    engine = make_engine(weights_bytes=2**24, kv_bytes=2**26)
    engine.load("a", spec(folder))
    assert interfaces.overlaps(next(iter(engine.models.values())).runner.engine)
    assert answers(engine, folder, requests) == expected


def test_answers_stop_and_requests_leave_while_a_step_is_in_flight(
    checkpoint: Checkpoint, make_engine: MakeEngine
) -> None:
    folder = checkpoint("llama")
    starts = ([start, start + 1, start + 2] for start in range(3, 90))
    stopping = next(prompt for prompt in starts if len(greedy_tokens(folder, prompt, 24)) < 24)
    engine = loaded(make_engine, folder)
    for _ in range(2):  # the second time with what is left in flight
        engine.add(request("stops", stopping, max_tokens=24))
        engine.add(request("cancelled", stopping, max_tokens=40, ignore_eos=True))
        received: list[str] = []
        while received.count("cancelled") < 3:
            outputs = engine.step()
            assert all(sequence.pending == 1 for sequence in engine.requests if sequence.generated)
            received += [output.request_id for output in outputs]
        engine.cancel("cancelled")
        made = drain(engine)
        assert "cancelled" not in made.tokens
        assert engine.stats().instances[0].kv_used_bytes == 0
    engine.add(request("stops", stopping, max_tokens=24))
    made = drain(engine)
    assert made.tokens["stops"] == greedy_tokens(folder, stopping, 24)
    assert made.finished == {"stops": "stop"}


def test_models_that_take_turns_and_cpus_schedule_step_by_step() -> None:
    given: dict[str, Any] = {"weights_bytes": 10, "kv_bytes": 10}
    assert VllmEngineSettings(device="cuda:0", **given).overlapped
    assert not VllmEngineSettings(device="cuda:0", models_max=2, **given).overlapped
    assert not VllmEngineSettings(device="cuda:0", async_scheduling=False, **given).overlapped
    assert not VllmEngineSettings(device="cpu", **given).overlapped
