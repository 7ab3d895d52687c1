"""Quantized checkpoints on several ranks make the tokens of the weights that they stand for, and cut no group."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.protocol.errors import ModelLoadError
from ops.local.tiny_adapters import build_tiny_adapter
from tests.dataplane.engines.torch.deep import Ticks
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.lora import adapter_spec, merged
from tests.dataplane.engines.torch.model.packing import AWQ, FORMATS, FP8, GPTQ, awq, fp8, gptq, quantized_pair
from tests.dataplane.engines.torch.rank_engines import engine_of
from tests.dataplane.engines.torch.rank_threads import start_threads
from tests.dataplane.engines.torch.ranks.test_exactness import PROMPTS, check_greedy, tokens_of
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import greedy_tokens, save_tiny, spec_of

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "moe_intermediate_size": 128}
"""Sizes of which four ranks have whole groups of 16 and whole int32."""
SMALL_BLOCKS = "fp8, small blocks"
ALL = {name: one for name, one in FORMATS.items() if name != "fp8, blocks"} | {
    SMALL_BLOCKS: (FP8 | {"weight_block_size": [16, 32]}, fp8((16, 32)))
}
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, saved = tmp_path_factory.mktemp("wide"), dict[str, Path]()

    def make(architecture: str) -> Path:
        if architecture not in saved:
            saved[architecture] = save_tiny(architecture, root / architecture, **WIDE)
        return saved[architecture]

    return make


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = engine_of(request.param, tmp_path_factory.mktemp("models"), weights_bytes=2**20)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        *((form, "llama") for form in ALL),
        *(("gptq", one) for one in ("internlm3", "phi3", "qwen3", "gemma2")),
        *(("awq", one) for one in ("internlm3", "phi3")),
        (SMALL_BLOCKS, "phi3"),
        ("gptq, by activations", "internlm3"),
        *((form, "mixtral") for form in ("awq", "gptq, 8 bits", "fp8, one scale")),
        *((form, "qwen3_moe") for form in ("gptq", "gptq, by activations", SMALL_BLOCKS)),
    ],
)
def test_tokens_are_those_of_the_weights_that_a_checkpoint_stands_for(
    form: str, architecture: str, engine: TorchEngine, wide: Callable[[str], Path], tmp_path: Path
) -> None:
    """Layers with biases (internlm3), several weights in one (phi3) and experts among them."""
    quantized, meant = quantized_pair(wide(architecture), tmp_path, *ALL[form])
    expected = {which: greedy_tokens(meant, prompt, MAX_TOKENS) for which, prompt in PROMPTS.items()}
    assert tokens_of(engine, "a", quantized) == expected


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8, one scale"])
def test_a_quantized_output_embedding(form: str, engine: TorchEngine, tmp_path: Path) -> None:
    dense = save_tiny("llama", tmp_path / "dense", vocab_size=128, tie_word_embeddings=False, **WIDE)
    quantized, meant = quantized_pair(dense, tmp_path, *ALL[form], head=True)
    expected = {which: greedy_tokens(meant, prompt, MAX_TOKENS) for which, prompt in PROMPTS.items()}
    assert tokens_of(engine, "a", quantized) == expected


def test_a_quantized_output_embedding_that_would_be_cut_is_refused(tmp_path: Path) -> None:
    dense = save_tiny("llama", tmp_path / "dense", vocab_size=104, tie_word_embeddings=False, **WIDE)
    quantized, _ = quantized_pair(dense, tmp_path, *ALL["awq"], head=True)
    rank = Rank(index=0, count=2, collectives=Unconnected())
    with pytest.raises(ModelLoadError, match="lm_head cannot be divided among 2 GPUs: the 52 outputs are no multiple"):
        build_skeleton(quantized, torch.float32, torch.device("cpu"), rank=rank)


@pytest.mark.parametrize("form", ["awq", "gptq, by activations", SMALL_BLOCKS])
def test_an_adapter_on_a_quantized_base(
    form: str, engine: TorchEngine, wide: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized, meant = quantized_pair(wide("llama"), tmp_path, *ALL[form])
    adapter = build_tiny_adapter(tmp_path / "adapter", meant)
    whole = merged(meant, adapter, tmp_path / "merged")
    engine.load("base", spec_of("model", quantized))
    engine.load("a", adapter_spec("one", adapter, quantized))
    engine.add(request("r", PROMPTS["long"], max_tokens=MAX_TOKENS))
    engine.add(request("b", PROMPTS["long"], instance_id="base", max_tokens=MAX_TOKENS))
    made = drain(engine).tokens
    engine.unload("a")
    engine.unload("base")
    assert made == {name: greedy_tokens(one, PROMPTS["long"], MAX_TOKENS) for name, one in (("r", whole), ("b", meant))}


def test_quantized_and_dense_models_take_turns_in_memory_for_one(wide: Callable[[str], Path], tmp_path: Path) -> None:
    quantized, meant = quantized_pair(wide("llama"), tmp_path, *ALL["gptq"])
    settings = slot_for_one((quantized, meant), ranks=2, cache_folder=tmp_path / "models", kv_bytes=2**17)
    engine = TorchEngine(settings, Ticks(), other_ranks=start_threads(1))
    folders = {"quantized": quantized, "dense": meant}
    for name, folder in folders.items():
        engine.load(name, spec_of(name, folder))
    expected = {}
    for number in range(4):
        for name in folders:
            prompt = [5 + number, 9, 33, 60 - number]
            engine.add(request(f"{name}-{number}", prompt, instance_id=name, max_tokens=MAX_TOKENS))
            expected[f"{name}-{number}"] = greedy_tokens(meant, prompt, MAX_TOKENS)
        gathered = drain(engine).tokens
        assert gathered == {name: expected[name] for name in gathered}
    assert engine.stats().switches_total >= 4
    engine.close()


@pytest.mark.parametrize("form", ["awq", "gptq", SMALL_BLOCKS])
def test_each_rank_has_the_bytes_of_its_part(form: str, wide: Callable[[str], Path], tmp_path: Path) -> None:
    """Of four ranks, two and two have the same of the two KV heads. All have the index of GPTQ's groups."""
    quantized, _ = quantized_pair(wide("llama"), tmp_path, *ALL[form])

    def packed_bytes(ranks: int, *layers: str) -> int:
        rank = Rank(index=0, count=ranks, collectives=Unconnected())
        places = build_skeleton(quantized, torch.float32, torch.device("cpu"), rank=rank).places
        names = [(place, place.names[0]) for place in places]
        kept = [place for place, name in names if any(one in name for one in layers) and not name.endswith(".g_idx")]
        return sum(math.prod(place.shape) * place.dtype.itemsize for place in kept)

    whole = packed_bytes(1, "_proj.")
    assert 2 * packed_bytes(2, "_proj.") == whole
    assert 4 * packed_bytes(4, "_proj.") == whole + packed_bytes(1, ".k_proj.", ".v_proj.")


@pytest.mark.parametrize(
    ("config", "pack", "changes", "reason"),
    [
        (
            GPTQ | {"group_size": 32},
            gptq(4, 32),
            {"intermediate_size": 96},
            "mlp.down_proj cannot be divided among 2 GPUs: the 48 inputs are no multiple of 32, which",
        ),
        (
            AWQ | {"group_size": 32},
            awq(32),
            {"intermediate_size": 96},
            "48 inputs are no multiple of 32, which quantization_config.group_size=32 keeps",
        ),
        (
            AWQ | {"group_size": -1},
            awq(10**6),
            {"intermediate_size": 72},
            "36 outputs are no multiple of 8, which quantization_config.bits=4 keeps",
        ),
        (
            FP8 | {"weight_block_size": [64, 32]},
            fp8((64, 32)),
            {"num_key_value_heads": 2},
            "the 32 outputs are no multiple of 64, which quantization_config.weight_block_size=[64, 32] keeps together",
        ),
    ],
)
def test_a_group_that_would_be_cut_is_refused_and_nothing_is_kept_of_it(
    config: dict[str, Any], pack: Any, changes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    dense = save_tiny("llama", tmp_path / "dense", **{**WIDE, **changes})
    quantized, _ = quantized_pair(dense, tmp_path, config, pack)
    engine = engine_of(2, tmp_path / "models", weights_bytes=2**20)
    with pytest.raises(ModelLoadError) as refused:
        engine.load("a", spec_of("a", quantized))
    assert reason in refused.value.message
    check_greedy(engine, "dense", dense)
    engine.close()
