"""Quantized checkpoints: each format means what its description says, and what is no such format is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.checkpoint import list_tensors
from dataplane.engines.torch.model.quantized.layers import QuantizedExperts, QuantizedLinear
from dataplane.engines.torch.model.skeleton import Skeleton, build_skeleton
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.model.packing import FORMATS, GPTQ, fp8, gptq, quantized_pair
from tests.dataplane.engines.torch.tiny import greedy_tokens, save_tiny, spec_of

PROMPT = [60, 5, 12, 9, 33]
Checkpoint = Callable[[str], Path]


def engine_with(*folders: Path) -> TorchEngine:
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2**20, kv_bytes=2**18), lambda: 0.0)
    for folder in folders:
        engine.load(folder.name, spec_of(folder.name, folder))
    return engine


def tokens_of(engine: TorchEngine, folder: Path, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    engine.add(request(f"{folder.name} {prompt}", prompt, instance_id=folder.name, max_tokens=24))
    gathered = drain(engine)
    (tokens,) = gathered.tokens.values()
    assert gathered.errors == {}
    assert tokens, "an answer without tokens says nothing of the weights"
    return tokens


def skeleton_of(folder: Path, task: Task = "generate") -> Skeleton:
    return build_skeleton(folder, torch.float32, torch.device("cpu"), task)


@pytest.mark.parametrize(
    ("form", "architecture"),
    [*((form, "llama") for form in FORMATS), *(("gptq", one) for one in ("internlm3", "phi3", "qwen3", "gemma2"))],
)
def test_tokens_are_those_of_the_weights_that_a_checkpoint_stands_for(
    form: str, architecture: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config, pack = FORMATS[form]
    quantized, meant = quantized_pair(checkpoint(architecture), tmp_path, config, pack)
    assert any(isinstance(one, QuantizedLinear) for one in skeleton_of(quantized).model.modules())
    assert tokens_of(engine_with(quantized), quantized) == greedy_tokens(meant, PROMPT, 24)


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8, one scale"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_output_embedding_may_be_quantized(form: str, is_tied: bool, tmp_path: Path) -> None:
    """Also where the config says that it is the embedding: that is stored, too, and not quantized."""
    dense = save_tiny("llama", tmp_path / "dense", vocab_size=96, tie_word_embeddings=False)
    quantized, meant = quantized_pair(dense, tmp_path, *FORMATS[form], head=True)
    described = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(described | {"tie_word_embeddings": is_tied}))
    skeleton = skeleton_of(quantized)
    assert isinstance(skeleton.model.lm_head, QuantizedLinear)
    assert len(skeleton.shards) == skeleton.geometry.layers + 2, "it has a shard of its own"
    assert tokens_of(engine_with(quantized), quantized) == greedy_tokens(meant, PROMPT, 24)


def test_quantized_and_dense_models_take_turns(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config, pack = FORMATS["gptq"]
    quantized, meant = quantized_pair(checkpoint("llama"), tmp_path, config, pack)
    one_model = skeleton_of(meant).slabs(2**14) * 2**14
    settings = TorchEngineSettings(weights_bytes=one_model, kv_bytes=2**18, slab_bytes=2**14)
    engine = TorchEngine(settings, lambda: 0.0)
    for folder in (quantized, meant):
        engine.load(folder.name, spec_of(folder.name, folder))
    for prompt in ([3, 4, 5], [50, 8], [7, 7, 9, 61]):
        assert tokens_of(engine, quantized, prompt) == tokens_of(engine, meant, prompt)
    assert engine.stats().switches_total >= 5


def test_a_switch_moves_as_many_bytes_as_the_checkpoint_has(tmp_path: Path) -> None:
    wide = save_tiny("llama", tmp_path / "dense", hidden_size=256, intermediate_size=512, head_dim=64)
    quantized, _ = quantized_pair(wide, tmp_path, GPTQ | {"group_size": 128}, gptq(4, 128))
    stored = sum(one.size_bytes for one in list_tensors(quantized).values())
    size_bytes = skeleton_of(quantized).size_bytes
    assert size_bytes == pytest.approx(stored, rel=0.01)
    assert size_bytes < 0.2 * skeleton_of(wide).size_bytes  # of float32; of bfloat16 it would be below 0.4


@pytest.mark.parametrize("head", [False, True])
def test_a_quantized_model_embeds(head: bool, tmp_path: Path) -> None:
    dense = save_tiny("qwen3", tmp_path / "dense", vocab_size=96, tie_word_embeddings=False)
    quantized, meant = quantized_pair(dense, tmp_path, *FORMATS["awq"], head=head)
    values = []
    for folder in (quantized, meant):
        engine = TorchEngine(TorchEngineSettings(weights_bytes=2**20, kv_bytes=2**18), lambda: 0.0)
        engine.load("a", replace(spec_of("a", folder), task="embed"))
        engine.add(request("one", PROMPT, max_tokens=1, pooling=True))
        values.append(torch.tensor(drain(engine).values["one"]))
    assert torch.allclose(values[0], values[1], atol=1e-5)
    assert values[0].norm() > 0


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: Any) -> Path:
    """Change a checkpoint's tensors, or keys of its `quantization_config`."""
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    described = json.loads(file.read_text())
    described["quantization_config"] |= config
    file.write_text(json.dumps(described))
    return folder


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("form", "change", "config", "error"),
    [
        (
            "awq",
            None,
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; supported are awq",
        ),
        ("awq", None, {"bits": 8}, "quantization_config.bits is 8; awq is supported with 4"),
        ("gptq", None, {"bits": 3}, "quantization_config.bits is 3; gptq is supported with 4, 8"),
        ("gptq", None, {"bits": "four"}, "quantization_config.bits is 'four'"),
        ("gptq", None, {"group_size": 0.5}, "group_size must be a whole number, or -1 for all rows; it is 0.5"),
        ("awq", None, {"version": "marlin"}, "version 'marlin' is not supported; supported is gemm"),
        ("fp8, blocks", None, {"weight_block_size": [128]}, "weight_block_size must be two whole numbers above 0"),
        ("gptq", None, {"group_size": 32}, "has shape (3, 6), the config says (2, 6)"),
        ("gptq", lambda t: t.pop(f"{LAYER}.scales"), {}, f"misses 1 tensors, such as {LAYER}.scales"),
        (
            "gptq",
            lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.g_idx"].clone()}),
            {},
            "supported is F32 or F16 or BF16",
        ),
        (
            "fp8, blocks",
            lambda t: t.update({LAYER: t[f"{LAYER}.weight"].clone()}),
            {},
            f"unexpected 1 tensors, such as {LAYER}",
        ),
    ],
)
def test_what_is_no_such_format_is_refused(
    form: str,
    change: Callable[[dict[str, torch.Tensor]], object] | None,
    config: dict[str, Any],
    error: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    quantized, _ = quantized_pair(checkpoint("llama"), tmp_path, *FORMATS[form])
    with pytest.raises(ModelLoadError) as refused:
        engine_with(changed(quantized, change, **config))
    assert error in refused.value.message


def test_the_order_of_activations_is_one_of_gptq_only(checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantized, meant = quantized_pair(checkpoint("llama"), tmp_path, *FORMATS["awq"])
    assert tokens_of(engine_with(changed(quantized, desc_act=True)), quantized) == greedy_tokens(meant, PROMPT, 24)


def test_scales_of_activations_and_of_a_quantized_cache_are_not_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantized, meant = quantized_pair(checkpoint("llama"), tmp_path, *FORMATS["fp8, one scale"])
    scales = ("model.layers.0.mlp.up_proj.input_scale", "model.layers.0.self_attn.k_scale")
    changed(quantized, lambda tensors: tensors.update({name: torch.tensor(0.5) for name in scales}))
    assert tokens_of(engine_with(quantized), quantized) == greedy_tokens(meant, PROMPT, 24)


EXPERTS = {"mixtral": {"intermediate_size": 64}, "qwen3_moe": {"moe_intermediate_size": 32}}
"""Sizes of whole int32."""


@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("form", FORMATS)
def test_tokens_of_quantized_experts_are_those_of_the_weights_that_they_stand_for(
    form: str, architecture: str, tmp_path: Path
) -> None:
    dense = save_tiny(architecture, tmp_path / "dense", **EXPERTS[architecture])
    quantized, meant = quantized_pair(dense, tmp_path, *FORMATS[form])
    assert any(isinstance(one, QuantizedExperts) for one in skeleton_of(quantized).model.modules())
    assert tokens_of(engine_with(quantized), quantized) == greedy_tokens(meant, PROMPT, 24)


def test_quantized_experts_beside_dense_ones_of_a_layer_are_refused(tmp_path: Path) -> None:
    dense = save_tiny("qwen3_moe", tmp_path / "dense", **EXPERTS["qwen3_moe"])
    quantized, _ = quantized_pair(dense, tmp_path, *FORMATS["awq"])
    layer = "model.layers.1.mlp.experts.3.up_proj"
    weights = load_file(dense / "model.safetensors")[f"{layer}.weight"]

    def mixed(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("qweight", "qzeros", "scales"):
            del tensors[f"{layer}.{name}"]
        tensors[f"{layer}.weight"] = weights

    with pytest.raises(ModelLoadError, match=rf"{layer} is not quantized, but other experts of its layer are"):
        engine_with(changed(quantized, mixed))


def test_a_quantized_embedding_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantized, _ = quantized_pair(checkpoint("llama"), tmp_path, *FORMATS["fp8, one scale"])
    name = "model.embed_tokens.weight"
    with pytest.raises(ModelLoadError, match=r"embed_tokens is quantized, which is supported of linear layers and"):
        engine_with(changed(quantized, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})))


def test_outputs_that_do_not_fill_an_integer_are_refused(tmp_path: Path) -> None:
    odd = save_tiny("llama", tmp_path / "dense", intermediate_size=100)
    quantized, _ = quantized_pair(odd, tmp_path, *FORMATS["fp8, one scale"])
    tensors = {f"{LAYER}.qweight": torch.zeros(6, 100, dtype=torch.int32)}
    changed(quantized, lambda stored: stored.update(tensors), **GPTQ)
    with pytest.raises(ModelLoadError, match="cannot be quantized in 4 bits: its 100 outputs are no multiple of 8"):
        engine_with(quantized)


def test_eight_bit_weights_without_a_config_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantized, _ = quantized_pair(checkpoint("llama"), tmp_path, {}, fp8(None))
    file = quantized / "config.json"
    described = json.loads(file.read_text())
    del described["quantization_config"]
    file.write_text(json.dumps(described))
    changes = {
        name: tensor for name, tensor in load_file(quantized / "model.safetensors").items() if "_scale" not in name
    }
    save_file(changes, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="has dtype F8_E4M3, which needs a quantization_config"):
        engine_with(quantized)
