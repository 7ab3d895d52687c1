"""These tests run in vLLM's own environment (`make test-vllm`); elsewhere each file is skipped."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.vllm import interfaces
from tests.dataplane.engines.torch.tiny import save_tiny

HEAD_DIM = 32
"""The least that vLLM's attention on a CPU knows."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False, "hidden_size": 4 * HEAD_DIM},
    "qwen3": {},
    "mistral": {},
    "mixtral": {"hidden_size": 4 * HEAD_DIM},
    "phi3": {},
    "gemma2": {},
    "granite": {},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny checkpoint, written when first asked for."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(architecture: str) -> Path:
        target = root / architecture
        return target if target.exists() else save_tiny(architecture, target, head_dim=HEAD_DIM, **SHAPES[architecture])

    return folder


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """A vLLM engine of the settings given; all are closed in the end."""
    interfaces.prepare_process("cpu")
    from dataplane.engines.vllm.engine import VllmEngine  # noqa: PLC0415
    from dataplane.engines.vllm.settings import VllmEngineSettings  # noqa: PLC0415

    made = []

    def make(**changes: Any) -> VllmEngine:
        given = {"weights_bytes": 10**7, "kv_bytes": 2**21, "batch_max": 4, "block_tokens": 32, **changes}
        made.append(VllmEngine(VllmEngineSettings(**given), time.monotonic))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
