"""Models whose weights contain an adapter's products, merged by hand, and specs of adapters."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from dataplane.protocol.messages import BaseModel, ModelSpec
from ops.local.tiny_adapters import build_tiny_adapter
from tests.dataplane.engines.torch.tiny import CONTEXT_TOKENS


def merged(base: Path, adapter: Path, target: Path) -> Path:
    """A checkpoint of the base with `W + scale * up @ down` in place of each changed W."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** (0.5 if config.get("use_rslora") else 1))
    shutil.copytree(base, target)
    weights = load_file(target / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, down in factors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = factors[name.replace("lora_A", "lora_B")]
            weights[f"{layer}.weight"] += scale * up @ down
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def adapter_maker(root: Path, checkpoint: Callable[[str], Path]) -> Callable[..., tuple[Path, Path]]:
    """Makes an adapter of an architecture's checkpoint, and the checkpoint with it merged, when first asked for."""

    def make(architecture: str, name: str, **fields: Any) -> tuple[Path, Path]:
        adapter, whole = root / architecture / name, root / architecture / f"{name}-merged"
        if not whole.exists():
            build_tiny_adapter(adapter, checkpoint(architecture), **fields)
            merged(checkpoint(architecture), adapter, whole)
        return adapter, whole

    return make


def adapter_spec(name: str, adapter: Path, base: Path, *, base_name: str = "model") -> ModelSpec:
    """The model spec of an adapter of such a checkpoint."""
    return ModelSpec(
        name=name,
        path=str(adapter),
        weights_bytes=1,
        kv_bytes_per_token=1,
        context_tokens=CONTEXT_TOKENS,
        base=BaseModel(name=base_name, path=str(base), weights_bytes=1),
    )
