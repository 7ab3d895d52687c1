"""vLLM on a GPU: the torch engine's tokens, and models that leave and come back. Runs where both are at hand."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.vllm.interfaces import prepare_process
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.test_greedy import prompts
from tests.dataplane.engines.torch.tiny import VOCABULARY, save_tiny, spec_of

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

MODELS = ("llama", "qwen3", "mixtral")
"""The last computes in vLLM's scratch memory, which all engines of a process share."""
HEAD_DIM = 64
QUICK = TurnSettings(decode=DecodeSettings(quota_max_s=0.01, quota_min_s=0.01))
Tokens = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(name, root / name, head_dim=HEAD_DIM, hidden_size=4 * HEAD_DIM) for name in MODELS}


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """A vLLM engine of the settings given; all are closed in the end."""
    prepare_process("cuda")
    from dataplane.engines.vllm.engine import VllmEngine  # noqa: PLC0415
    from dataplane.engines.vllm.settings import VllmEngineSettings  # noqa: PLC0415

    made = []

    def make(**changes: Any) -> VllmEngine:
        given = {"device": "cuda", "weights_bytes": 2**27, "kv_bytes": 2**25, "batch_max": 4, **changes}
        made.append(VllmEngine(VllmEngineSettings(**given), time.monotonic))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine: Any, *models: str) -> None:
    for model in models:
        for name, prompt in prompts(VOCABULARY, (6, 18, 33)).items():
            engine.add(request(model + name, prompt, instance_id=model, max_tokens=24, ignore_eos=True))


def alone(make_engine: Callable[..., Any], folders: dict[str, Path], model: str, **changes: Any) -> Tokens:
    """The tokens of a model on a slot of its own."""
    engine = make_engine(**changes)
    engine.load(model, spec_of(model, folders[model]))
    ask(engine, model)
    gathered = drain(engine)
    assert gathered.errors == {}
    engine.close()
    return gathered.tokens


@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_of_the_torch_engine(model: str, folders: dict[str, Path], make_engine: Callable[..., Any]) -> None:
    settings = TorchEngineSettings(device="cuda", weights_bytes=2**27, kv_bytes=2**25)
    ours = TorchEngine(settings, time.monotonic)
    ours.load(model, spec_of(model, folders[model]))
    ask(ours, model)
    expected = drain(ours).tokens
    ours.close()
    assert alone(make_engine, folders, model) == expected, "compiled and captured"
    assert alone(make_engine, folders, model, models_max=2) == expected, "eager, as models that take turns are"


def test_models_leave_the_gpu_and_come_back(
    folders: dict[str, Path], make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    expected: Tokens = {}
    for model in MODELS:
        expected |= alone(make_engine, folders, model, models_max=2)
    engine = make_engine(models_max=len(MODELS), turns=QUICK, cache_folder=tmp_path / "cache")
    held_bytes = []
    for model in MODELS:
        engine.load(model, spec_of(model, folders[model]))
        held_bytes.append(torch.cuda.memory_allocated())
    assert max(held_bytes) < 2 * min(held_bytes), "only the one that is awake holds memory"
    ask(engine, *MODELS)
    made = drain(engine)
    assert made.errors == {}
    assert made.tokens == expected
    assert engine.stats().switches_total > len(MODELS)
    engine.unload(MODELS[0])
    ask(engine, MODELS[-1])
    assert drain(engine).errors == {}, "one that ends takes nothing from the others"
