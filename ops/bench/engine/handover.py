"""How soon a decode worker goes on with requests that a prefill worker began, by how it waits for their KV.

Two real worker processes, to which this one speaks as an agent does, and requests that come all at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from dataplane.engines.core.kv import KvEvents
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.profiling.checkpoints import BenchModel, DtypeName, Shape, build_checkpoints
from ops.profiling.handover import HandoverError, devices_of, measure_handovers

HEAD_DIM = 64
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def measure_waits(
    model: BenchModel,
    shape: Shape,
    folder: Path,
    *,
    ways: Sequence[KvEvents],
    device: str,
    dtype: DtypeName,
    requests: int,
    prompt_tokens: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Seconds from the first to the second token of requests that are handed over, by how their KV is waited for.

    Raises:
        HandoverError: a worker ended, or refused what it was asked.
    """
    kv_values = 2 * shape.layers * shape.config["num_key_value_heads"] * shape.head_dim
    for kv_events in ways:
        found = measure_handovers(
            model,
            folder,
            devices=devices_of(device),
            dtype=dtype,
            kv_events=kv_events,
            requests=requests,
            prompt_tokens=prompt_tokens,
            kv_token_bytes=kv_values * _ITEM_BYTES[dtype],
            rounds=rounds,
        )
        yield {"kv_events": kv_events, "prompt_tokens": prompt_tokens, **asdict(found)}


def main(
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 256.")] = 512,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[int, typer.Option(min=1, max=256, help="At once.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=4000)] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one that is not.")] = 3,
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure the wait between the first and the second token of requests that one worker prefills and another decodes.

    \b
    Example:
      python -m ops.bench.engine.handover --requests 6 --prompt-tokens 1000 --json
    """
    if hidden % (4 * HEAD_DIM):
        raise typer.BadParameter(f"must be a multiple of {4 * HEAD_DIM}, not {hidden}", param_hint="--hidden")
    ways = get_args(KvEvents) if torch.device(device).type == "cuda" else ("off", "host")
    dtype: DtypeName = "bfloat16" if device == "cuda" else "float32"
    shape, rows = Shape(hidden=hidden, layers=layers, head_dim=HEAD_DIM), []
    try:
        with work_folder() as folder:
            [model] = build_checkpoints(folder / "model", [shape], dtype, device=device)
            for row in measure_waits(
                model,
                shape,
                folder,
                ways=ways,
                device=device,
                dtype=dtype,
                requests=requests,
                prompt_tokens=prompt_tokens,
                rounds=rounds,
            ):
                notes().print(f"{row['kv_events']}: {row['gap_s']:.3f} s")
                rows.append(row)
    except HandoverError as error:
        notes().print(str(error), markup=False)
        raise typer.Exit(1) from error
    if as_json:
        print_json(rows)
        return
    print_table("From the first to the second token", COLUMNS, rows)


COLUMNS: Columns = {
    "KV events": "kv_events",
    "median": lambda row: f"{row['gap_s']:.3f} s",
    "longest": lambda row: f"{row['longest_s']:.3f} s",
    "waited for": lambda row: ", ".join(f"{what} {count}" for what, count in row["waited_for"].items()),
}


if __name__ == "__main__":
    typer.run(main)
