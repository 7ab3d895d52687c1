"""How far guessed step times are from measured ones: `python -m ops.bench.engine.guessed_times POINTS`.

POINTS is a CSV file as Aegaeon's artifact publishes, see `tidepool node profile --from`: each set of points is one
model on one or several GPUs of a type. A guess is compared with every point, not with a fit of them.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.profiling.cards import CARDS
from ops.profiling.guess import guess_times
from ops.profiling.published_points import PointSet, read_points

KV_BYTES_PER_TOKEN = {
    "internlm2_5_7b_chat": 131_072,
    "qwen2_5_7b": 57_344,
    "yi1_5_6b_chat": 65_536,
    "yi1_5_9b_chat": 98_304,
}
"""Of models with fewer KV heads than heads; others have as many, and width and layers by their size."""
_WIDTH_AND_LAYERS = ((8e9 * 2, 4096 * 32), (15e9 * 2, 5120 * 40))
_VALUES_BYTES = 4


def main(
    points: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="CSV; packed by gzip or not.")],
    as_json: AsJson = False,
) -> None:
    """Ratios of guessed to measured times, for prefills and decode steps, by model and GPU type."""
    rows = [row for one in read_points(points) if (row := compared(one)) is not None]
    if as_json:
        print_json(rows)
        return
    columns: Columns = {
        "set": "set",
        "GPUs": "gpus",
        "GPU": "gpu_type",
        "model": "model",
        "prefill": lambda row: f"{row['prefill']:.2f}",
        "decode": lambda row: f"{row['decode']:.2f}",
        "points": "points",
    }
    print_table("Guessed over measured, medians of points", columns, rows)
    off = [one for is_group in (False, True) for one in _off([row for row in rows if (row["gpus"] > 1) is is_group])]
    print_table("Off by a factor of", {name: name for name in ("GPUs", "step", "median", "worst")}, off)


def compared(points: PointSet) -> dict[str, Any] | None:
    """The medians of guessed over measured, of prefills and of decode steps; None where size or card is not known."""
    weights_bytes, card = points.weights_bytes, CARDS.get(points.gpu_type.upper())
    if weights_bytes is None or card is None or not points.prefill or not points.decode:
        return None
    kv_bytes = kv_bytes_of(points.model, weights_bytes)
    latency = guess_times(weights_bytes, kv_bytes, card, gpus=points.gpus).latency
    return {
        "set": points.source.rpartition(f"/{points.model}/")[0],
        "gpus": points.gpus,
        "gpu_type": card.name,
        "model": points.model,
        "prefill": median(latency.prefill_s(one.tokens, one.squared_tokens) / one.seconds for one in points.prefill),
        "decode": median(latency.decode_s(one.context_tokens, one.batch) / one.seconds for one in points.decode),
        "points": len(points.prefill) + len(points.decode),
    }


def kv_bytes_of(model: str, weights_bytes: int) -> int:
    """KV bytes of a token, two bytes a value."""
    usual = next((cells for most, cells in _WIDTH_AND_LAYERS if weights_bytes < most), _WIDTH_AND_LAYERS[-1][1])
    return KV_BYTES_PER_TOKEN.get(model, _VALUES_BYTES * usual)


def _off(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """By kind of step, how far the sets' medians are off, either way."""
    for step in ("prefill", "decode") if rows else ():
        factors = [math.exp(abs(math.log(row[step]))) for row in rows]
        gpus = "-".join(sorted({str(row["gpus"]) for row in rows}))
        yield {"GPUs": gpus, "step": step, "median": f"{median(factors):.2f}", "worst": f"{max(factors):.2f}"}


if __name__ == "__main__":
    typer.run(main)
