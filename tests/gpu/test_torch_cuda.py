"""The torch engine on a GPU: the same code, the same greedy tokens as on the CPU. Runs where a GPU is at hand."""

from pathlib import Path

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from ops.local.tiny_models import RECIPES, build_tiny_models
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.tiny import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def _tokens(folder: Path, device: str) -> dict[str, tuple[int, ...]]:
    settings = TorchEngineSettings(weights_bytes=2**25, kv_bytes=2**22, device=device, prefill_tokens_per_step_max=16)
    engine = TorchEngine(settings, lambda: 0.0)
    engine.load("a", spec_of("model", folder))
    for length in (1, 9, 40):
        prompt = [(7 * place + length) % 500 for place in range(length)]
        engine.add(request(f"r{length}", prompt, max_tokens=24, ignore_eos=True))
    return drain(engine).tokens


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_greedy_tokens_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    (model,) = build_tiny_models(tmp_path, [name])
    assert _tokens(model.path, "cuda") == _tokens(model.path, "cpu")
