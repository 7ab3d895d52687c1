"""The stored tensor of each weight of a model in a GGUF file: name, shape and order of rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from ops.gguf.configs import ARCHITECTURES
from ops.gguf.header import GgufError, GgufHeader, GgufTensor

_NOT_WEIGHTS = frozenset(
    GGMLQuantizationType[name] for name in ["I8", "I16", "I32", "I64", "F64", "Q1_0", "Q8_1", "Q8_K"]
)
"""Types that `gguf.dequantize` does not support."""
_FLOATS = frozenset((GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16))


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor of the checkpoint: the rows `rows`, in this order, of the `stored_rows` rows of a stored tensor. `shift`
    is subtracted from all values.
    """

    name: str
    shape: tuple[int, ...]
    stored: GgufTensor
    stored_rows: int
    rows: NDArray[np.int64]
    shift: float

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def find_weights(header: GgufHeader, config: dict[str, Any]) -> list[Weight]:
    """All weights of the model that the config describes.

    Raises:
        GgufError: a tensor is missing, has another shape, or does not belong to the model.
    """
    architecture = str(header.metadata["general.architecture"])
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    weights: list[Weight] = []
    for name, shape in _parameters(header, config).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        weights += _from_file(header, config, names, name, shape)
    left = header.tensors.keys() - {weight.stored.name for weight in weights}
    if left:
        raise GgufError(f"{header.path}: {', '.join(sorted(left)[:4])} is not supported in a model of {architecture}")
    return weights


def _parameters(header: GgufHeader, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters in transformers."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model = build(AutoConfig.for_model(config["model_type"], **fields))
    except Exception as error:  # a config of implausible sizes can raise anything
        raise GgufError(f"{header.path}: its settings describe no model that can be built: {error}") from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _from_file(
    header: GgufHeader, config: dict[str, Any], names: Any, name: str, shape: tuple[int, ...]
) -> Iterator[Weight]:
    """The weights of one parameter: one, or with fused experts one per expert, by their names in checkpoints."""
    architecture = ARCHITECTURES[str(header.metadata["general.architecture"])]
    layer, fused, part = name.partition(".mlp.experts.")
    if fused:
        experts, rows, columns = shape
        projections = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        rows //= len(projections)
        for projection in projections:
            stored = _stored(header, names, f"{layer}{fused}{projection}", "", (experts, rows, columns))
            for expert in range(experts):
                yield Weight(
                    name=f"{layer}{fused}{expert}.{projection}.weight",
                    shape=(rows, columns),
                    stored=stored,
                    stored_rows=experts * rows,
                    rows=np.arange(expert * rows, (expert + 1) * rows),
                    shift=0.0,
                )
        return
    base, _, kind = name.rpartition(".")
    stored = _stored(header, names, base, f".{kind}", shape)
    permuted = architecture.permuted and base.endswith(("q_proj", "k_proj"))
    stored_rows = shape[0] if len(shape) > 1 or permuted else 1
    rows_in_order = np.arange(stored_rows)
    if permuted:
        if len(shape) == 1 and stored.kind not in _FLOATS:
            raise GgufError(f"{header.path}: tensor {stored.name} must hold floats, not {stored.kind.name}")
        heads = config["num_attention_heads" if base.endswith("q_proj") else "num_key_value_heads"]
        # llama.cpp interleaves the two halves of a head's rows
        rows_in_order = rows_in_order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    shift = 1.0 if architecture.norms_plus_one and base.endswith("norm") else 0.0
    yield Weight(name=name, shape=shape, stored=stored, stored_rows=stored_rows, rows=rows_in_order, shift=shift)


def _stored(header: GgufHeader, names: Any, base: str, suffix: str, shape: tuple[int, ...]) -> GgufTensor:
    """The file's tensor for a parameter."""
    found = names.get_name(base)
    stored = header.tensors.get(f"{found}{suffix or '.weight'}") if found else None
    if stored is None:
        raise GgufError(f"{header.path}: the tensor for {base}{suffix} is missing")
    if stored.kind in _NOT_WEIGHTS:
        raise GgufError(f"{header.path}: tensor {stored.name} is of type {stored.kind.name}, which is not supported")
    if stored.shape != shape:
        raise GgufError(f"{header.path}: tensor {stored.name} has the shape {stored.shape}, not {shape}")
    return stored
