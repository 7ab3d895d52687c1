"""The torch engine on a GPU: the same code, the same greedy tokens as on the CPU. Runs where a GPU is at hand."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from ops.local.tiny_models import RECIPES, build_tiny_models
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.model.packing import FORMATS, quantized_pair
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, CONTEXT_TOKENS, VOCABULARY, save_tiny, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def _tokens(folder: Path, device: str, vocabulary: int = 500) -> dict[str, tuple[int, ...]]:
    settings = TorchEngineSettings(weights_bytes=2**25, kv_bytes=2**22, device=device, prefill_tokens_per_step_max=16)
    engine = TorchEngine(settings, lambda: 0.0)
    engine.load("a", spec_of("model", folder))
    for length in (1, 9, 40):
        prompt = [(7 * place + length) % vocabulary for place in range(length)]
        engine.add(request(f"r{length}", prompt, max_tokens=24, ignore_eos=True))
    return drain(engine).tokens


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_greedy_tokens_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    (model,) = build_tiny_models(tmp_path, [name])
    assert _tokens(model.path, "cuda") == _tokens(model.path, "cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_makes_the_tokens_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    folder = save_tiny(architecture, tmp_path / "model")
    assert _tokens(folder, "cuda", VOCABULARY) == _tokens(folder, "cpu", VOCABULARY)


@pytest.mark.parametrize("form", FORMATS)
def test_quantized_models_make_the_tokens_of_the_cpu(form: str, tmp_path: Path) -> None:
    """Prompts of 40 tokens are prefilled 16 at a time: all products are those of packed weights."""
    quantized, _ = quantized_pair(save_tiny("llama", tmp_path / "dense"), tmp_path, *FORMATS[form])
    assert _tokens(quantized, "cuda", VOCABULARY) == _tokens(quantized, "cpu", VOCABULARY)


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq, by activations", "fp8, blocks", "fp8, one scale"])
def test_quantized_experts_make_the_tokens_of_the_cpu(form: str, tmp_path: Path) -> None:
    dense = save_tiny("qwen3_moe", tmp_path / "dense", moe_intermediate_size=32)
    quantized, _ = quantized_pair(dense, tmp_path, *FORMATS[form])
    assert _tokens(quantized, "cuda", VOCABULARY) == _tokens(quantized, "cpu", VOCABULARY)


def test_graphs_of_quantized_models_change_no_token(tmp_path: Path) -> None:
    """In memory for one, a model in 4 bits and one in FP8."""
    dense = {form: save_tiny("llama", tmp_path / form / "dense", seed=len(form)) for form in ("gptq", "fp8, blocks")}
    folders = [quantized_pair(one, one.parent, *FORMATS[form])[0] for form, one in dense.items()]
    tokens, captures = _switched(folders, cuda_graphs=True)
    expected, without = _switched(folders, cuda_graphs=False)
    assert tokens == expected
    assert (captures >= 4, without) == (True, 0)


def _switched(folders: list[Path], *, cuda_graphs: bool, **settings: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    """The tokens of two models in memory for one, by requests of many lengths; how many graphs were captured."""
    known = TorchEngineSettings(
        weights_bytes=2**20, kv_bytes=2**21, slab_bytes=2**16, device="cuda", cuda_graphs=cuda_graphs, **settings
    )
    engine = TorchEngine(known, lambda: 0.0)
    for number, folder in enumerate(folders):
        engine.load(str(number), spec_of(f"model-{number}", folder))
    for number in range(22):
        prompt = [(5 * place + number) % VOCABULARY for place in range(1 + 3 * number)]
        fields = {"instance_id": str(number % 2), "max_tokens": 8 + 4 * number, "ignore_eos": True}
        engine.add(request(f"r{number}", prompt, **fields))
    gathered = drain(engine)
    assert gathered.errors == {}
    captures = engine._steps._captures
    engine.close()
    return gathered.tokens, captures


def test_graphs_change_no_token(tmp_path: Path) -> None:
    """Models are switched, batches shrink, and graphs of other sizes take over."""
    folders = [save_tiny(name, tmp_path / name) for name in ("llama", "gemma2")]
    tokens, captures = _switched(folders, cuda_graphs=True)
    expected, without = _switched(folders, cuda_graphs=False)
    assert tokens == expected
    assert (captures >= 4, without) == (True, 0)


def test_graphs_run_in_bfloat16(tmp_path: Path) -> None:
    """Batches of other sizes round otherwise, so that tokens may differ from those without graphs."""
    folders = [save_tiny(name, tmp_path / name) for name in ("qwen3", "mistral")]
    tokens, captures = _switched(folders, cuda_graphs=True, dtype="bfloat16")
    assert captures >= 4
    assert {name: len(made) for name, made in tokens.items()} == {f"r{n}": 8 + 4 * n for n in range(22)}


@pytest.mark.parametrize("name", sorted(RECIPES)[:2])
def test_prefixes_come_back_from_host_memory_and_change_no_token(name: str, tmp_path: Path) -> None:
    """Six conversations take turns in memory for less than half of them."""
    (model,) = build_tiny_models(tmp_path, [name])
    settings = TorchEngineSettings(
        weights_bytes=2**25, kv_bytes=2**20, host_kv_bytes=2**24, slab_bytes=2**17, device="cuda"
    )
    engine = TorchEngine(settings, time.monotonic)
    engine.load("a", spec_of("model", model.path))
    length = min(engine.stats().instances[0].kv_tokens_max * 2 // 3 - 32, CONTEXT_TOKENS - 16)
    prompts = [[(7 * place + number) % 500 for place in range(length)] for number in range(6)]
    seen, cached = [], []
    for number, prompt in enumerate(prompts * 2):
        engine.add(request(f"r{number}", prompt, max_tokens=16, ignore_eos=True))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        seen.append([token for output in outputs for token in output.token_ids])
        cached.append(outputs[0].cached_tokens)
        engine.check()
    engine.close()
    assert seen[:6] == seen[6:]
    assert cached[:6] == [0] * 6
    assert all(tokens >= length - 16 for tokens in cached[6:])
