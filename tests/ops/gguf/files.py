"""GGUF files as llama.cpp's own converter writes them, of tiny checkpoints: the way back must lead where it began."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from gguf.constants import MODEL_ARCH_NAMES, RopeScalingType, TokenType
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ops.local.tiny_models import CHAT_TEMPLATE, END_TOKEN, ROLE_TOKENS, train_tokenizer
from tests.dataplane.engines.torch.tiny import save_tiny

VOCABULARY = 512
NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4, "num_hidden_layers": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "granite": {},
    "llama": {"rope_theta": 50_000.0},
    "olmo2": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"sliding_window": None},
}
"""Changes of the tiny checkpoints of the engine's tests that make them expressible in GGUF."""
_SETTINGS = {
    "attention_multiplier": ("add_attention_scale",),
    "attn_logit_softcapping": ("add_attn_logit_softcapping",),
    "embedding_multiplier": ("add_embedding_scale",),
    "final_logit_softcapping": ("add_final_logit_softcapping",),
    "head_dim": ("add_key_length", "add_value_length", "add_rope_dimension_count"),
    "hidden_size": ("add_embedding_length",),
    "intermediate_size": ("add_feed_forward_length",),
    "layer_norm_eps": ("add_layer_norm_eps",),
    "logit_scale": ("add_logit_scale",),
    "logits_scaling": ("add_logit_scale",),
    "max_position_embeddings": ("add_context_length",),
    "moe_intermediate_size": ("add_expert_feed_forward_length",),
    "norm_epsilon": ("add_layer_norm_eps",),
    "num_attention_heads": ("add_head_count",),
    "num_experts": ("add_expert_count",),
    "num_experts_per_tok": ("add_expert_used_count",),
    "num_hidden_layers": ("add_block_count",),
    "num_local_experts": ("add_expert_count",),
    "num_key_value_heads": ("add_head_count_kv",),
    "residual_multiplier": ("add_residual_scale",),
    "rms_norm_eps": ("add_layer_norm_rms_eps",),
    "vocab_size": ("add_vocab_size",),
}
_PERMUTED = {"granite", "llama", "smollm3"}


def save_original(architecture: str, folder: Path, **changes: Any) -> Path:
    """A tiny checkpoint whose rows are whole blocks, with the demo's vocabulary; `changes` instead of `CHANGES`."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "head_dim": 16, "initializer_range": 0.15}
    return save_tiny(architecture, folder, **{**sizes, **(changes or CHANGES[architecture])})


def write_gguf(original: Path, file: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, **more: Any) -> Path:
    """The file of a checkpoint. Matrices are of `kind`, all else F32. `more`: settings besides, by their last name."""
    config = json.loads((original / "config.json").read_text())
    architecture = NAMES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(file, architecture)
    for name, adders in _SETTINGS.items():
        for adder in adders if config.get(name) is not None else ():
            getattr(writer, adder)(config[name])
    _write_attention(writer, config)
    for key, value in more.items():
        writer.add_string(f"{architecture}.{key.replace('__', '.')}", value)
    write_tokenizer(writer)
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    for name, weight in _stacked(load_file(original / "model.safetensors")).items():
        base, _, suffix = name.rpartition(".")
        found = names.get_name(base)
        assert found is not None, base
        _write_tensor(writer, f"{found}.{suffix}", _as_stored(config, architecture, base, weight), kind)
    finish(writer)
    return file


def finish(writer: GGUFWriter) -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_attention(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    wide = rope.get("full_attention", rope)
    writer.add_rope_freq_base(wide.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if wide.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(wide["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def write_tokenizer(writer: GGUFWriter, **changes: Any) -> None:
    """The demo's tokenizer, byte-level BPE."""
    described = json.loads(train_tokenizer().to_str())
    by_id = {number: token for token, number in described["model"]["vocab"].items()}
    special = {END_TOKEN, *ROLE_TOKENS}
    tokens = [by_id[number] for number in range(VOCABULARY)]
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(END_TOKEN))
    writer.add_eos_token_id(tokens.index(END_TOKEN))
    writer.add_add_bos_token(changes.get("begins", False))
    writer.add_chat_template(CHAT_TEMPLATE)


def _stacked(weights: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """With the experts of a layer in one tensor."""
    plain: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, weight in weights.items():
        numbered = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if numbered:
            experts.setdefault(numbered[1] + numbered[3], {})[int(numbered[2])] = weight
        else:
            plain[name] = weight
    return plain | {name: np.stack([rows[n] for n in sorted(rows)]) for name, rows in experts.items()}


def _as_stored(
    config: dict[str, Any], architecture: str, base: str, weight: NDArray[np.float32]
) -> NDArray[np.float32]:
    if architecture in _PERMUTED and base.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if base.endswith("q_proj") else "num_key_value_heads"]
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if architecture.startswith("gemma") and base.endswith("norm"):
        return weight + 1
    return weight


def _write_tensor(writer: GGUFWriter, name: str, weight: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
    if weight.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(weight))
    elif kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, np.ascontiguousarray(weight.astype(np.float16)))
    else:
        writer.add_tensor(name, quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
