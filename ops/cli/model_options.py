"""Options of `model` that hold numbers (GPU=NUMBER, TIER=TTFT,TBT, GPU=TORCH,VLLM) or one of a few names."""

import math
from typing import Any, get_args

import typer


def require_choice(option: str, given: str | None, choices: Any) -> None:
    """Refuse a name that is not one of a `Literal`'s. None was not given.

    Raises:
        typer.BadParameter: it is another name.
    """
    names = get_args(choices)
    if given is not None and given not in names:
        raise typer.BadParameter(f"{option} must be one of {', '.join(names)}, not '{given}'")


def parse_rate(text: str) -> tuple[str, float]:
    """A rate above 0, and the GPU type that it is of.

    Raises:
        typer.BadParameter: the text is not GPU=NUMBER.
    """
    gpu_type, numbers = _split(text)
    if not gpu_type or len(numbers) != 1:
        raise typer.BadParameter(f"--tokens-per-s takes GPU=NUMBER above 0, such as H800=12000, not '{text}'")
    return gpu_type, numbers[0]


def parse_objective(text: str) -> tuple[str, dict[str, float]]:
    """An interactive tier, and its objectives in seconds.

    Raises:
        typer.BadParameter: the text is not TIER=TTFT,TBT.
    """
    tier, numbers = _split(text)
    if tier not in {"IW-F", "IW-N"} or len(numbers) != 2:
        raise typer.BadParameter(
            f"--slo takes IW-F or IW-N, then =TTFT,TBT in seconds, such as IW-F=0.5,0.1, not '{text}'"
        )
    return tier, {"ttft_s": numbers[0], "tbt_s": numbers[1]}


def parse_engine_rates(texts: list[str], gpu_types: list[str]) -> dict[str, dict[str, float]]:
    """The measured rates of both engines, by GPU type.

    Raises:
        typer.BadParameter: a text is not GPU=TORCH,VLLM, or names none of `gpu_types`.
    """
    rates: dict[str, dict[str, float]] = {}
    for text in texts:
        gpu_type, numbers = _split(text)
        if len(numbers) != 2:
            raise typer.BadParameter(
                f"--engine-rates takes GPU=TORCH,VLLM above 0, such as H800=9000,15000, not '{text}'"
            )
        if gpu_type not in gpu_types:
            raise typer.BadParameter(f"--engine-rates is of '{gpu_type}', which --tokens-per-s does not name")
        rates[gpu_type] = {"torch": numbers[0], "vllm": numbers[1]}
    return rates


def _split(text: str) -> tuple[str, list[float]]:
    """The name before the last `=`, and the numbers after it; no numbers unless all are above 0 and finite."""
    name, _, values = text.rpartition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        return name, []
    return name, numbers if all(0 < number < math.inf for number in numbers) else []
