"""What a config says of its quantized weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dataplane.protocol.errors import ModelLoadError

Method = Literal["awq", "gptq", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What a config says of its quantized weights. `group`: rows of the input with one scale, 0: all. `is_shifted`:
    zero points are stored less one. `by_index`: rows are in groups in any order. `block`: outputs and inputs that share
    a scale, None: one scale for the tensor.
    """

    method: Method
    bits: int = 8
    group: int = 0
    is_shifted: bool = False
    by_index: bool = False
    block: tuple[int, int] | None = None


def read_quantization(folder: Path | str, described: Mapping[str, Any]) -> Quantization | None:
    """What `config.json` says; None: the weights are not quantized.

    Raises:
        ModelLoadError: a method, or a variant of one, that is not supported.
    """
    given = described.get("quantization_config")
    if given is None:
        return None
    where = f"{folder}/config.json: quantization_config"
    if not isinstance(given, dict):
        raise ModelLoadError(f"{where} must be an object")
    method = given.get("quant_method")
    if method == "fp8":
        return Quantization(method="fp8", block=_block(where, given.get("weight_block_size")))
    if method not in get_args(Method):
        supported = ", ".join(get_args(Method))
        raise ModelLoadError(f"{where}.quant_method {method!r} is not supported; supported are {supported}")
    allowed = (4,) if method == "awq" else (4, 8)
    bits, group = given.get("bits"), given.get("group_size")
    if not isinstance(bits, int) or bits not in allowed:
        raise ModelLoadError(f"{where}.bits is {bits!r}; {method} is supported with {', '.join(map(str, allowed))}")
    if not isinstance(group, int) or isinstance(group, bool) or group < -1:
        raise ModelLoadError(f"{where}.group_size must be a whole number, or -1 for all rows; it is {group!r}")
    if method == "awq" and str(given.get("version", "gemm")).lower() != "gemm":
        raise ModelLoadError(f"{where}.version {given['version']!r} is not supported; supported is gemm")
    return Quantization(
        method="awq" if method == "awq" else "gptq",
        bits=bits,
        group=max(group, 0),
        is_shifted=method == "gptq" and given.get("checkpoint_format", "gptq") == "gptq",
        by_index=method == "gptq" and bool(given.get("desc_act")),
    )


def _block(where: str, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    match given:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ModelLoadError(f"{where}.weight_block_size must be two whole numbers above 0; it is {given!r}")
