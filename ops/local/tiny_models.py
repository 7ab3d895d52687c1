"""Eight demo models of a few megabytes, built locally: real Hugging Face folders with random weights.

Their text is random, but architecture, tokenizer, chat template and safetensors files are real.
The same names give the same bytes on every machine of the same library versions: weights come from a seeded
generator. The output rows of tokens that do not print are zero, so greedy text is printable. All are about as large, so
that memory for two of them is memory for any two.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

VOCABULARY = 512
CONTEXT_TOKENS = 2048
END_TOKEN = "<|end|>"  # noqa: S105  # a token of text, not of access
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TEXT = """
The tide comes in and the tide goes out, and the harbour never sleeps. In the morning the boats lie on the sand; at
noon they float; in the evening they are gone. Nobody tells the water what to do, yet everybody knows when it will
come: there is a table on the wall of the harbour office, with the hours of every day of the year.
Requests are like that. They rise when people wake, they fall when people sleep, and between the continents the wave
travels with the sun. A model that is busy in one region is idle in another. What should we do with the machines that
wait? We could let them wait. We could turn them off and on again, which takes ten minutes. Or we could let many models
share one machine, and switch between them so quickly that nobody notices: one token for you, one token for me.
How are you today? I am fine, thank you. What is the weather like? It is raining, and the wind comes from the west.
Please write a short story about a lighthouse. Once upon a time there was a lighthouse that was afraid of the dark.
Please summarise the report in three sentences. Please translate this text. Please explain how a pump works.
for i in range(10): print(i) def add(a, b): return a + b if x > 0 else 0 import json, sys, time, math 0 1 2 3 4 5 6 7 8
The first, the second, the third; one, two, three, four, five, six, seven, eight, nine, ten, eleven and twelve.
"""


def train_tokenizer() -> Any:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens; every byte is one, so any text can be encoded."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[END_TOKEN, *ROLE_TOKENS],
        initial_alphabet=sorted(ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    return tokenizer


def printable_ids(tokenizer: Any) -> list[int]:
    """The tokens that decode to printable ASCII in any context."""
    texts = {token: tokenizer.decode([token]) for token in range(VOCABULARY)}
    return [token for token, text in texts.items() if text and all(" " <= letter <= "~" for letter in text)]


def tokenizer_config() -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_TOKEN,
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


_COMPLETE_MARK = "tidepool.json"
_RECIPE = 2
"""Raise it when anything here or in the tokenizer changes what is built: folders of an older recipe are built again."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A demo model: a name to register, and the folder of its checkpoint."""

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a demo model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a demo model is made. `biased`: queries, keys and values have biases; `fused`: they are one matrix, as are
    the two that lead into the MLP; `head_norms`: queries and keys are normalised; `sandwich`: so is a block's output.
    `extra`: further keys of its config.
    """

    architecture: str
    model_type: str
    shape: Shape
    tied: bool = False
    biased: bool = False
    fused: bool = False
    head_norms: bool = False
    sandwich: bool = False
    extra: Mapping[str, Any]


RECIPES: dict[str, Recipe] = {
    "tiny-llama": Recipe(
        architecture="LlamaForCausalLM",
        model_type="llama",
        shape=Shape(hidden=160, intermediate=432, layers=5, heads=5, kv_heads=5, head_dim=32),
        extra={"mlp_bias": False, "attention_bias": False},
    ),
    "tiny-qwen3": Recipe(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        shape=Shape(hidden=128, intermediate=448, layers=6, heads=4, kv_heads=2, head_dim=48),
        head_norms=True,
        extra={"attention_bias": False, "use_sliding_window": False},
    ),
    "tiny-gemma3": Recipe(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        shape=Shape(hidden=128, intermediate=576, layers=6, heads=4, kv_heads=1, head_dim=32),
        tied=True,
        head_norms=True,
        sandwich=True,
        extra={
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
        },
    ),
    "tiny-mistral": Recipe(
        architecture="MistralForCausalLM",
        model_type="mistral",
        shape=Shape(hidden=192, intermediate=512, layers=4, heads=6, kv_heads=2, head_dim=32),
        extra={"sliding_window": 512},
    ),
    "tiny-qwen2": Recipe(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        shape=Shape(hidden=160, intermediate=512, layers=5, heads=5, kv_heads=1, head_dim=32),
        biased=True,
        extra={"use_sliding_window": False},
    ),
    "tiny-phi3": Recipe(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        shape=Shape(hidden=128, intermediate=448, layers=7, heads=4, kv_heads=2, head_dim=32),
        fused=True,
        extra={"sliding_window": 256},
    ),
    "tiny-gemma2": Recipe(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        shape=Shape(hidden=128, intermediate=576, layers=6, heads=4, kv_heads=2, head_dim=32),
        tied=True,
        sandwich=True,
        extra={
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
        },
    ),
    "tiny-smollm3": Recipe(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        shape=Shape(hidden=192, intermediate=544, layers=4, heads=6, kv_heads=2, head_dim=32),
        tied=True,
        extra={"attention_bias": False, "mlp_bias": False, "no_rope_layers": [1, 1, 1, 0]},
    ),
}


def build_tiny_models(folder: Path, names: Sequence[str] | None = None) -> list[TinyModel]:
    """Make the named demo models (all of `RECIPES` by default) as sub-folders of `folder`.

    Complete ones are left alone; what an interrupted build left behind is made again.

    Raises:
        ValueError: a name that is none of `RECIPES`.
        OSError: a file cannot be written.
    """
    wanted = list(RECIPES) if names is None else list(names)
    unknown = [name for name in wanted if name not in RECIPES]
    if unknown:
        raise ValueError(f"unknown tiny model {unknown[0]!r}; there are {', '.join(RECIPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        if not _is_complete(folder / name):
            _build(folder, name)
    return [TinyModel(name=name, path=folder / name) for name in wanted]


def _is_complete(target: Path) -> bool:
    """Whether the folder is of this recipe and every file has its full size."""
    try:
        mark = json.loads((target / _COMPLETE_MARK).read_text(encoding="utf-8"))
        sizes = {name: (target / name).stat().st_size for name in mark["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(mark.get("recipe") == _RECIPE and sizes == mark["files"])


def _build(folder: Path, name: str) -> None:
    """Write everything to a temporary folder, then rename it, so that no partial model is visible."""
    recipe = RECIPES[name]
    target, partial = folder / name, folder / f".{name}.partial"
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    tokenizer = train_tokenizer()
    end_id = tokenizer.token_to_id(END_TOKEN)
    (partial / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(partial / "config.json", _config(recipe, end_id))
    _write_json(partial / "generation_config.json", {"bos_token_id": end_id, "eos_token_id": end_id})
    _write_json(partial / "tokenizer_config.json", tokenizer_config())
    weights = save(_weights(name, recipe, tokenizer), metadata={"format": "pt"})
    (partial / "model.safetensors").write_bytes(weights)
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    _write_json(partial / _COMPLETE_MARK, {"recipe": _RECIPE, "files": files})
    partial.rename(target)


def _config(recipe: Recipe, end_id: int) -> dict[str, Any]:
    return {
        "architectures": [recipe.architecture],
        "model_type": recipe.model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": recipe.shape.hidden,
        "intermediate_size": recipe.shape.intermediate,
        "num_hidden_layers": recipe.shape.layers,
        "num_attention_heads": recipe.shape.heads,
        "num_key_value_heads": recipe.shape.kv_heads,
        "head_dim": recipe.shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": recipe.tied,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "dtype": "float32",
        **recipe.extra,
    }


def _weights(name: str, recipe: Recipe, tokenizer: Any) -> dict[str, NDArray[np.float32]]:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))

    def normal(*shape: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * gain / math.sqrt(shape[-1])).astype(np.float32)

    silent = np.ones(VOCABULARY, dtype=bool)
    silent[[*printable_ids(tokenizer), tokenizer.token_to_id(END_TOKEN)]] = False
    weights = {"model.embed_tokens.weight": normal(VOCABULARY, recipe.shape.hidden, gain=0.6 if recipe.tied else 0.3)}
    output = "model.embed_tokens.weight"
    if not recipe.tied:
        output = "lm_head.weight"
        weights[output] = normal(VOCABULARY, recipe.shape.hidden, gain=3.0)
    weights[output][silent] = 0.0
    for layer in range(recipe.shape.layers):
        weights.update(_layer_weights(f"model.layers.{layer}", recipe, normal))
    # Tied embeddings are also the output rows: kept small, or each token would only predict itself, so the last norm
    # makes up for it.
    weights["model.norm.weight"] = np.full(recipe.shape.hidden, 4.0 if recipe.tied else 1.0, dtype=np.float32)
    return weights


def _layer_weights(
    prefix: str, recipe: Recipe, normal: Callable[..., NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    hidden, inner, kv = (
        recipe.shape.hidden,
        recipe.shape.heads * recipe.shape.head_dim,
        recipe.shape.kv_heads * recipe.shape.head_dim,
    )
    neutral = 0.0 if recipe.sandwich else 1.0  # Gemma's norms multiply by 1 + weight, the others by the weight itself
    norms = ["input_layernorm", "post_attention_layernorm"]
    if recipe.sandwich:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    weights = {f"{norm}.weight": np.full(hidden, 1.0, dtype=np.float32) for norm in norms}
    if recipe.head_norms:
        for norm in ("q_norm", "k_norm"):
            weights[f"self_attn.{norm}.weight"] = np.full(recipe.shape.head_dim, neutral, dtype=np.float32)
    qkv = [normal(inner, hidden, gain=1.5), normal(kv, hidden, gain=1.5), normal(kv, hidden)]
    gate_up = [normal(recipe.shape.intermediate, hidden) for _ in range(2)]
    if recipe.fused:
        weights["self_attn.qkv_proj.weight"] = np.concatenate(qkv)
        weights["mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
    else:
        weights |= {f"self_attn.{name}_proj.weight": weight for name, weight in zip("qkv", qkv, strict=True)}
        weights |= {f"mlp.{name}_proj.weight": weight for name, weight in zip(("gate", "up"), gate_up, strict=True)}
    if recipe.biased:
        weights |= {f"self_attn.{name}_proj.bias": normal(len(w), gain=2.0) for name, w in zip("qkv", qkv, strict=True)}
    weights["self_attn.o_proj.weight"] = normal(hidden, inner, gain=2.0)
    weights["mlp.down_proj.weight"] = normal(hidden, recipe.shape.intermediate, gain=2.0)
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
