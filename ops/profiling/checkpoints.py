"""Checkpoints for benchmarks: real architectures of any size with random weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM

from dataplane.protocol.messages import ModelSpec

ARCHITECTURES = ("llama", "qwen3", "gemma2", "mistral")
VOCABULARY = 8192
CONTEXT_TOKENS = 4096
DtypeName = Literal["float32", "bfloat16"]

_LAYERS = ((2 * 10**8, 12), (2 * 10**9, 24), (10**10, 32))
_UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A checkpoint on disk."""

    name: str
    folder: Path
    weights_bytes: int
    context_tokens: int = CONTEXT_TOKENS

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            name=self.name,
            path=str(self.folder),
            weights_bytes=self.weights_bytes,
            kv_bytes_per_token=0,
            context_tokens=self.context_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    hidden: int
    layers: int
    head_dim: int

    @property
    def config(self) -> dict[str, Any]:
        """Keys of transformers' configs: a quarter as many KV heads as heads, a feed-forward ratio of 8/3, in whole
        groups of 128 inputs, as quantized checkpoints have them.
        """
        heads = self.hidden // self.head_dim
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3 // 128 * 128,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4,
            "head_dim": self.head_dim,
        }


def parameters_of(text: str) -> int:
    """`90M` or `7B` as a number of parameters. Raises ValueError for other texts."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        count = round(float(text[:-1]) * unit) if unit else 0
    except (ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise ValueError(f"{text!r} is no number of parameters such as 90M or 7B")
    return count


def shape_of(parameters: int) -> Shape:
    """Sizes of about that many parameters: 10.5 hidden^2 per layer, and 2 hidden per word of the vocabulary."""
    layers = next((layers for limit, layers in _LAYERS if parameters < limit), 40)
    head_dim = 64 if parameters < _LAYERS[1][0] else 128
    step = 4 * head_dim
    hidden = step
    while 10.5 * layers * (hidden + step / 2) ** 2 + 2 * VOCABULARY * (hidden + step / 2) < parameters:
        hidden += step
    return Shape(hidden=hidden, layers=layers, head_dim=head_dim)


def build_checkpoints(
    folder: Path,
    shapes: Sequence[Shape],
    dtype: DtypeName,
    *,
    device: str = "cpu",
    context_tokens: int = CONTEXT_TOKENS,
) -> list[BenchModel]:
    """Write a checkpoint of each shape into a sub-folder, architectures in rotation. Weights are drawn on `device`."""
    build: Any = AutoModelForCausalLM.from_config
    built = []
    for number, shape in enumerate(shapes):
        architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
        config = AutoConfig.for_model(
            architecture,
            vocab_size=VOCABULARY,
            max_position_embeddings=context_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **shape.config,
        )
        torch.manual_seed(number)
        with torch.device(device):
            model = build(config, dtype=getattr(torch, dtype))
        target = folder / f"{architecture}-{number}"
        model.save_pretrained(target)
        weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        built.append(
            BenchModel(name=target.name, folder=target, weights_bytes=weights_bytes, context_tokens=context_tokens)
        )
    return built


def write_tokenizer(folder: Path) -> None:
    """Give a checkpoint a byte-level tokenizer, each of whose tokens is a word of its own with the blank before it."""
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġw{number}": number for number in range(VOCABULARY)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
