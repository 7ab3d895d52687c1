"""Small LoRA adapters of small models, as PEFT would write them, with random factors.

The same name and base give the same bytes. Their factors are large enough that their answers differ from the base's.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dataplane.checkpoints.adapters import CONFIG_FILE, WEIGHTS_FILE
from dataplane.checkpoints.safetensors_file import list_tensors

_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(?!gate\.)(?P<target>\w+)\.weight")
_GAIN = 0.6


def build_tiny_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Iterable[str] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of a checkpoint. `targets`: the last part of its layers' names; None: all linear ones. `config`:
    further fields.
    """
    seed = int.from_bytes(hashlib.sha256(folder.name.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))
    wanted = None if targets is None else set(targets)
    factors: dict[str, NDArray[np.float32]] = {}
    changed = set()
    for name, tensor in sorted(list_tensors(base).items()):
        match = _LINEAR.fullmatch(name)
        if match is None or len(tensor.shape) != 2 or (wanted is not None and match["target"] not in wanted):
            continue
        outputs, inputs = tensor.shape
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        down = random.standard_normal((rank, inputs)) / math.sqrt(inputs)
        up = random.standard_normal((outputs, rank)) * _GAIN * rank / alpha / math.sqrt(rank)
        factors[f"{layer}.lora_A.weight"] = down.astype(np.float32)
        factors[f"{layer}.lora_B.weight"] = up.astype(np.float32)
        changed.add(match["target"])
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted(changed),
        "inference_mode": True,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(factors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder
