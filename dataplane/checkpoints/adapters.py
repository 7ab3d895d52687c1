"""LoRA adapters on disk as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`. No tensor is read.

An adapter adds to the output of a linear layer, whose weights are W, a product of low rank:

    y = W x + scale * up (down x)        down [rank, inputs], up [outputs, rank], scale = lora_alpha / rank

PEFT can write more than that. What changes the answer in another way is refused by its name in the config, also where
it is not known here; only fields that say how the adapter was trained are passed over.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.checkpoints.local import Sources
from dataplane.checkpoints.safetensors_file import FLOATS, ITEM_BYTES, StoredTensor, read_header, read_json
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.model_sources import is_remote

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_RANK_MAX = 128
"""The highest rank that any engine here serves."""
ALPHA_MAX = 2**20
"""Of `lora_alpha`, whatever its sign: thousands of times what adapters have."""

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_READ = frozenset(("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights", "task_type"))
_PASSED_OVER = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
    )
)
"""How it was trained, and to which layers it was added, which its tensors say too."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of an `init_lora_weights`, in lower case, that takes from the base what it gives to the adapter."""


@dataclass(frozen=True, kw_only=True)
class StoredFactors:
    """The two factors of a layer's product."""

    down: StoredTensor
    up: StoredTensor


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """An adapter of a folder. `layers`: by the name of the linear layer in the base's checkpoint."""

    folder: Path
    rank: int
    scale: float
    layers: Mapping[str, StoredFactors]

    @property
    def parameters(self) -> int:
        """The numbers in its factors."""
        factors = (tensor for layer in self.layers.values() for tensor in (layer.down, layer.up))
        return sum(math.prod(tensor.shape) for tensor in factors)

    @property
    def stored_bytes(self) -> int:
        factors = (tensor for layer in self.layers.values() for tensor in (layer.down, layer.up))
        return sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in factors)


def read_adapter(folder: Path, *, rank_max: int = ADAPTER_RANK_MAX) -> StoredAdapter:
    """The adapter of a folder.

    Raises:
        ModelLoadError: a file is missing or broken; the config has what is not supported, or a rank above `rank_max`;
            or a tensor is no factor of that rank.
    """
    where = folder / CONFIG_FILE
    config = read_json(where)
    _check_supported(where, config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= rank_max:
        raise ModelLoadError(f"{where}: r must be 1 to {rank_max}, not {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -ALPHA_MAX <= alpha <= ALPHA_MAX:
        raise ModelLoadError(f"{where}: lora_alpha must be a number from {-ALPHA_MAX} to {ALPHA_MAX}, not {alpha!r}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return StoredAdapter(folder=folder, rank=rank, scale=scale, layers=_layers(folder / WEIGHTS_FILE, rank))


def check_adapter(path: str, sources: Sources, *, files: bool) -> None:
    """Check that a node may use an adapter's folder, and with `files` that it can.

    Raises:
        ModelLoadError: the path is no folder, or outside of the node's roots; or the files as in `read_adapter`.
    """
    if is_remote(path):
        raise ModelLoadError(f"{path}: an adapter is read from a folder of the node; remote ones are not supported")
    sources.check_root(path)
    if files:
        read_adapter(Path(path))


def _check_supported(where: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelLoadError(f"{where}: peft_type {config.get('peft_type')!r} is not supported; supported is LORA")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelLoadError(f"{where}: task_type {config['task_type']!r} is not supported; supported is CAUSAL_LM")
    if config.get("bias", "none") != "none":
        raise ModelLoadError(f"{where}: bias {config['bias']!r} is not supported; supported is none")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelLoadError(f"{where}: init_lora_weights {start!r} is not supported: it changes the base's weights")
    unsupported = [name for name, value in config.items() if value and name not in _READ | _PASSED_OVER]
    if unsupported:
        raise ModelLoadError(f"{where}: {min(unsupported)} is not supported")


def _layers(file: Path, rank: int) -> Mapping[str, StoredFactors]:
    stored = read_header(file)
    for name, tensor in stored.items():
        if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
            raise ModelLoadError(f"{file}: tensor {name} is not supported; supported are factors of linear layers")
        if tensor.dtype not in FLOATS:
            raise ModelLoadError(f"{file}: tensor {name} has dtype {tensor.dtype}; supported are {_listed(FLOATS)}")
        if len(tensor.shape) != 2 or tensor.shape[name.endswith(_UP)] != rank:
            raise ModelLoadError(f"{file}: tensor {name} has shape {tensor.shape}, which is not of rank r={rank}")
    names = sorted({name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP) for name in stored})
    if not names:
        raise ModelLoadError(f"{file} has no tensors")
    for name in names:
        for end in (_DOWN, _UP):
            if f"{_PREFIX}{name}{end}" not in stored:
                raise ModelLoadError(f"{file} misses tensor {_PREFIX}{name}{end}")
    return {
        name: StoredFactors(down=stored[f"{_PREFIX}{name}{_DOWN}"], up=stored[f"{_PREFIX}{name}{_UP}"])
        for name in names
    }


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
