"""Dense checkpoints quantized as other tools publish them, and the dense weights that these stand for.

Written from the formats' descriptions with numpy, number by number, and not with what the engine uses.
"""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Floats = npt.NDArray[np.float32]
Packed = tuple[dict[str, torch.Tensor], Floats]
Pack = Callable[[Floats], Packed]
"""Of a layer's weights `[outputs, inputs]`: its tensors by name, and the weights that these stand for."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each four bits of an int32, from the lowest."""


def _grouped(weights: Floats, group: int, levels: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Integers `[inputs, outputs]`, zero points and scales (float16) `[groups, outputs]`."""
    rows = weights.T
    parts = [rows[at : at + group] for at in range(0, len(rows), group)]
    scales = np.stack([np.maximum(np.ptp(part, axis=0), 1e-3) / (levels - 1) for part in parts])
    scales = scales.astype(np.float16).astype(np.float32)
    zeros = np.stack([np.clip(np.round(-p.min(axis=0) / s), 0, levels - 1) for p, s in zip(parts, scales, strict=True)])
    integers = [np.clip(np.round(p / s) + z, 0, levels - 1) for p, s, z in zip(parts, scales, zeros, strict=True)]
    return np.concatenate(integers).astype(np.int64), zeros.astype(np.int64), scales


def _symmetric(weights: Floats, group: int, levels: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """As `_grouped`, with the zero point in the middle."""
    rows, half = weights.T, levels // 2
    parts = [rows[at : at + group] for at in range(0, len(rows), group)]
    scales = np.stack([np.maximum(np.abs(part).max(axis=0), 1e-3) / (half - 1) for part in parts])
    scales = scales.astype(np.float16).astype(np.float32)
    integers = [np.clip(np.round(p / s) + half, 0, levels - 1) for p, s in zip(parts, scales, strict=True)]
    return np.concatenate(integers).astype(np.int64), np.full(scales.shape, half, np.int64), scales


def _int32(numbers: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.uint32).view(np.int32).copy())


def awq(group: int) -> Pack:
    """AutoAWQ, `gemm`, 4 bits."""

    def pack(weights: Floats) -> Packed:
        integers, zeros, scales = _grouped(weights, group, 16)

        def packed(numbers: npt.NDArray[np.int64]) -> torch.Tensor:
            out = np.zeros((len(numbers), numbers.shape[1] // 8), np.int64)
            for place, column in enumerate(AWQ_ORDER):
                out |= numbers[:, column::8] << (4 * place)
            return _int32(out)

        at = np.arange(len(integers)) // group
        dense = ((integers - zeros[at]) * scales[at]).T.astype(np.float32)
        tensors = {"qweight": packed(integers), "qzeros": packed(zeros), "scales": torch.from_numpy(scales).half()}
        return tensors, dense

    return pack


def gptq(
    bits: int,
    group: int,
    *,
    shuffled: bool = False,
    shift: int = 1,
    symmetric: bool = False,
    positive: bool = False,
) -> Pack:
    """GPTQModel; `shuffled`: rows are in groups by their activations (`desc_act`); `shift`: 0 for `gptq_v2`;
    `symmetric`: all zero points are in the middle; `positive`: so are the weights of every third output, and its zero
    points are 0.
    """

    def pack(weights: Floats) -> Packed:
        inputs = weights.shape[1]
        if positive:
            weights = np.where(np.arange(len(weights))[:, None] % 3 == 0, np.abs(weights), weights)
        order = np.random.default_rng(inputs).permutation(inputs) if shuffled else np.arange(inputs)
        ordered, zeros, scales = (_symmetric if symmetric else _grouped)(weights[:, order], group, 1 << bits)
        integers, index = np.empty_like(ordered), np.empty(inputs, np.int64)
        integers[order], index[order] = ordered, np.arange(inputs) // group
        per = 32 // bits
        rows = np.zeros((inputs // per, len(weights)), np.int64)
        columns = np.zeros((len(zeros), len(weights) // per), np.int64)
        for place in range(per):
            rows |= integers[place::per] << (bits * place)
            columns += (zeros[:, place::per] - shift) << (bits * place)
        tensors = {"qweight": _int32(rows), "qzeros": _int32(columns), "scales": torch.from_numpy(scales).half()}
        tensors["g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, ((integers - zeros[index]) * scales[index]).T.astype(np.float32)

    return pack


def fp8(block: tuple[int, int] | None) -> Pack:
    """E4M3 with a scale for each block, or one for the tensor."""

    def pack(weights: Floats) -> Packed:
        rows, columns = block or weights.shape
        eights, dense = torch.empty(weights.shape, dtype=torch.float8_e4m3fn), np.empty_like(weights)
        scales = np.empty((-(-len(weights) // rows), -(-weights.shape[1] // columns)), np.float32)
        for i, j in np.ndindex(scales.shape):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = max(np.abs(weights[at]).max(), 1e-3) / 448
            eights[at] = torch.from_numpy(weights[at] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = eights[at].float().numpy() * scales[i, j]
        if block is None:
            return {"weight": eights, "weight_scale": torch.tensor(scales[0, 0])}, dense
        return {"weight": eights, "weight_scale_inv": torch.from_numpy(scales)}, dense

    return pack


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}

FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "awq": (AWQ, awq(16)),
    "awq, one group": (AWQ | {"group_size": -1}, awq(10**6)),
    "gptq": (GPTQ, gptq(4, 16)),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, gptq(8, 16, positive=True)),
    "gptq, zero points of 0": (GPTQ, gptq(4, 16, positive=True)),
    "gptq, by activations": (GPTQ | {"desc_act": True}, gptq(4, 16, shuffled=True)),
    "gptq, symmetric": (GPTQ | {"sym": True}, gptq(4, 16, symmetric=True)),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 16, shift=0)),
    "fp8, blocks": (FP8 | {"weight_block_size": [32, 20]}, fp8((32, 20))),
    "fp8, one scale": (FP8, fp8(None)),
}
"""By name: the `quantization_config`, and how a layer is packed."""


def quantized_pair(
    dense: Path, target: Path, config: dict[str, Any], pack: Pack, *, head: bool = False
) -> tuple[Path, Path]:
    """A checkpoint with the linear layers of `dense` quantized, and a dense one of the weights that it stands for.
    `head`: so is the output embedding.
    """
    folders = copytree(dense, target / "quantized"), copytree(dense, target / "meant")
    stored = load_file(dense / "model.safetensors")
    packed, meant = dict(stored), dict(stored)
    linear = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    for name, weights in stored.items():
        if not (".layers." in name and name.endswith(linear)) and not (head and name == "lm_head.weight"):
            continue
        tensors, values = pack(weights.float().numpy())
        del packed[name]
        packed |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in tensors.items()}
        meant[name] = torch.from_numpy(values.copy())
    for folder, tensors in zip(folders, (packed, meant), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folders[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return folders
