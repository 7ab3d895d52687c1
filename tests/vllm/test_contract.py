"""The contract of every engine (tests/contracts), run against vLLM's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.interface import Engine
from tests.contracts import test_engine
from tests.contracts.engines import CONTEXT_TOKENS, KV_TOKENS, PREFILL_TOKENS_PER_STEP_MAX, Subject
from tests.dataplane.engines.torch.tiny import save_tiny, spec_of
from tests.vllm.conftest import HEAD_DIM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

LEFT_OUT = {
    "test_instances_share_the_kv_of_the_slot": "each model of vLLM has KV blocks of its own",
    **dict.fromkeys(
        (name for name in vars(test_engine) if "hand" in name or "released" in name or "adopt" in name),
        "vLLM's engine hands nothing over: it has no prefill slots",
    ),
}
"""Tests of the contract that do not hold here, and why."""

globals().update(
    {name: test for name, test in vars(test_engine).items() if name.startswith("test_") and name not in LEFT_OUT}
)


def test_all_that_is_left_out_is_there() -> None:
    assert set(LEFT_OUT) <= set(vars(test_engine))
    assert len([name for name in globals() if name.startswith("test_")]) >= 15


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("contract")
    return {
        "first": save_tiny("llama", root / "first", head_dim=HEAD_DIM),
        "second": save_tiny("qwen3", root / "second", head_dim=HEAD_DIM),
        "oversized": save_tiny("mistral", root / "oversized", head_dim=HEAD_DIM, intermediate_size=4000),
    }


@pytest.fixture
def subject(folders: dict[str, Path], make_engine: Callable[..., Any]) -> Subject:
    specs = [spec_of(name, folder, context_tokens=CONTEXT_TOKENS) for name, folder in folders.items()]
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders.values()]
    engine = make_engine(
        weights_bytes=max(sizes[:2]),
        kv_bytes=(KV_TOKENS + 32) * 2 * 3 * 2 * HEAD_DIM * 4,  # vLLM keeps one block of 32 tokens to itself
        models_max=2,
        prefill_tokens_per_step_max=PREFILL_TOKENS_PER_STEP_MAX,
    )
    return Subject(engine=engine, prefiller=engine, models=(specs[0], specs[1]), oversized=specs[2])


@pytest.fixture
def engine(subject: Subject) -> Engine:
    subject.engine.load("a", subject.models[0])
    return subject.engine
