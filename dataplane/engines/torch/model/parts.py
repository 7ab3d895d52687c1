"""The modules of a model on `meta`, where tensors have shapes and no bytes: all of it, or the part that a rank has."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from dataplane.checkpoints.pooling import HEAD_SUFFIX
from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.engines.torch.model.attention import ATTENTION_NAME, register
from dataplane.engines.torch.model.quantized.config import read_quantization
from dataplane.engines.torch.model.quantized.replace import quantize
from dataplane.engines.torch.model.split import Split, make_splits, rank_config
from dataplane.protocol.messages import Task

_default_dtype = threading.Lock()
"""Held while transformers changes torch's default data type, which is of the whole process."""


def build_part(
    config: Any, described: Mapping[str, Any], task: Task, dtype: torch.dtype, ranks: int, folder: Path | str
) -> tuple[Any, dict[str, Split]]:
    """The modules of each of so many ranks, and how the weights of which they have a part are divided, by name.
    `config`: made of what is `described` in `folder`, or another source, for errors.

    Raises:
        ModelLoadError: the model cannot be divided among so many ranks.
    """
    register()
    whole = _on_meta(config, described, task, dtype)
    if ranks == 1:
        return whole, {}
    part = _on_meta(rank_config(config, ranks, dtype.itemsize, folder), described, task, dtype)
    return part, make_splits(_shapes(whole), _shapes(part), config, ranks)


def check_quantized_parts(source: str, described: Mapping[str, Any], types: Mapping[str, str], ranks: int) -> None:
    """Check that a quantized model that generates can be divided among so many ranks, without its weights. `described`:
    its config; `types`: of its tensors, by name.

    Raises:
        ModelLoadError: as an engine does that loads it in bfloat16.
    """
    quantization = read_quantization(source, described)
    if quantization is not None:
        config = AutoConfig.for_model(**described)
        model, splits = build_part(config, described, "generate", torch.bfloat16, ranks, source)
        stored = {
            name: StoredTensor(name=name, file=Path(source), dtype=dtype, shape=(), offset_bytes=0, size_bytes=0)
            for name, dtype in types.items()
        }
        quantize(source, model, quantization, stored, splits, repacks=lambda _: False)


def _on_meta(config: Any, described: Mapping[str, Any], task: Task, dtype: torch.dtype) -> Any:
    build: Any = _builder(described, task).from_config
    with _default_dtype, torch.device("meta"):
        return build(config, attn_implementation=ATTENTION_NAME, dtype=dtype)


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """By every name of a weight."""
    return {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}


def _builder(described: Mapping[str, Any], task: Task) -> Any:
    """The class that builds a model for a task. Without a classification head, a causal model scores by its logits."""
    names = described.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if task == "score" and architecture.endswith(HEAD_SUFFIX):
        return AutoModelForSequenceClassification
    return AutoModel if task == "embed" else AutoModelForCausalLM
