"""What the options of `model` say: GPU=NUMBER, TIER=TTFT,TBT and GPU=TORCH,VLLM."""

import typer


def parse_rate(text: str) -> tuple[str, float]:
    """A rate above 0, and the GPU type that it is of."""
    gpu_type, equals, number = text.rpartition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = 0.0
    if not equals or not gpu_type or not rate > 0:
        raise typer.BadParameter(f"--tokens-per-s takes GPU=NUMBER above 0, such as H800=12000, not '{text}'")
    return gpu_type, rate


def parse_objective(text: str) -> tuple[str, dict[str, float]]:
    """The objectives of an interactive tier, in seconds."""
    tier, _, seconds = text.partition("=")
    try:
        ttft_s, tbt_s = (float(part) for part in seconds.split(","))
    except ValueError:
        ttft_s = tbt_s = 0.0
    if tier not in {"IW-F", "IW-N"} or not ttft_s > 0 or not tbt_s > 0:
        raise typer.BadParameter(
            f"--slo takes IW-F or IW-N, then =TTFT,TBT in seconds, such as IW-F=0.5,0.1, not '{text}'"
        )
    return tier, {"ttft_s": ttft_s, "tbt_s": tbt_s}


def parse_engine_rates(texts: list[str], gpu_types: list[str]) -> dict[str, dict[str, float]]:
    """What both engines were measured to do, by GPU type."""
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        gpu_type, _, rates = text.rpartition("=")
        try:
            torch, vllm = (float(part) for part in rates.split(","))
        except ValueError:
            torch = vllm = 0.0
        if not torch > 0 or not vllm > 0:
            raise typer.BadParameter(
                f"--engine-rates takes GPU=TORCH,VLLM above 0, such as H800=9000,15000, not '{text}'"
            )
        if gpu_type not in gpu_types:
            raise typer.BadParameter(f"--engine-rates is of '{gpu_type}', of which --tokens-per-s says nothing")
        found[gpu_type] = {"torch": torch, "vllm": vllm}
    return found
