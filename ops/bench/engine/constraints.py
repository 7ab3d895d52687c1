"""What a JSON schema costs: tokens per second of the torch engine with one against without, all else equal."""

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.messages import Constraint, ModelSpec
from dataplane.protocol.tiers import Tier
from ops.client.screen import AsJson, notes, print_json, print_table
from ops.profiling.checkpoints import DtypeName

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "town": {"type": "string"}}},
    },
    "required": ["name", "age", "email", "tags", "address"],
}
SCHEMA: dict[str, Any] = {"type": "array", "items": _PERSON, "minItems": 10_000}
"""No answer ends before it is cut, so that all make equally many tokens."""


def main(
    path: Annotated[Path, typer.Option(help="A checkpoint folder with a tokenizer.")],
    sequences: Annotated[int, typer.Option(min=1, help="At once.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 64,
    device: Annotated[str, typer.Option(metavar="cpu|cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Of each kind, which alternate; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure decode with and without a JSON schema: tokens per second, and as `cpu_ratio` the processor time of all
    threads, which does not depend on what else the machine runs, and counts masks although they are computed beside.

    \b
    Example:
      python -m ops.bench.engine.constraints --path ~/.cache/tidepool/models/smollm2-135m-0.1.2
    """
    dtype: DtypeName = "float32" if device == "cpu" else "bfloat16"
    settings = TorchEngineSettings(
        device=device, dtype=dtype, weights_bytes=2**30, kv_bytes=2**30, batch_max=sequences, block_tokens=16
    )
    torch.set_num_threads(1)
    engine = TorchEngine(settings, time.monotonic)
    engine.load("a", ModelSpec(name="m", path=str(path), weights_bytes=1, kv_bytes_per_token=1, context_tokens=2048))
    constraint = Constraint(kind="json_schema", definition=json.dumps(SCHEMA))
    kinds = {"free": None, "schema": constraint}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_s = dict.fromkeys(kinds, 0.0)
    for number in range(rounds + 1):
        for kind, constrained in kinds.items():
            cpu_began_s = time.process_time()
            rate = _decode_rate(engine, constrained, sequences=sequences, tokens=tokens)
            notes().print(f"{kind}: {rate:.1f} tokens/s{' (warm-up)' if number == 0 else ''}", markup=False)
            if number:
                rates[kind].append(rate)
                cpu_s[kind] += time.process_time() - cpu_began_s
    engine.close()
    medians = {kind: median(values) for kind, values in rates.items()}
    figures = {**medians, "ratio": medians["schema"] / medians["free"], "cpu_ratio": cpu_s["free"] / cpu_s["schema"]}
    if as_json:
        print_json({"sequences": sequences, "tokens": tokens, "device": device, "figures": figures})
        return
    rows = [{"figure": name, "value": f"{value:.3f}"} for name, value in figures.items()]
    print_table(
        f"{path.name}, {sequences} sequences, {dtype} on {device}", {"figure": "figure", "value": "value"}, rows
    )


def _decode_rate(engine: TorchEngine, constraint: Constraint | None, *, sequences: int, tokens: int) -> float:
    """Tokens per second from the first token of the last sequence on to the end."""
    for number in range(sequences):
        engine.add(
            EngineRequest(
                request_id=f"{number}",
                instance_id="a",
                tier=Tier.IW_N,
                prompt=tuple(range(100 + number, 116 + number)),
                max_tokens=tokens,
                temperature=0.8,
                seed=number,
                ignore_eos=True,
                constraint=constraint,
            )
        )
    made: dict[str, int] = {}
    began_s, before = 0.0, 0
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output
            made[output.request_id] = made.get(output.request_id, 0) + len(output.token_ids)
        if len(made) == sequences and not began_s:
            began_s, before = time.perf_counter(), sum(made.values())
    assert sum(made.values()) == sequences * tokens, "an answer ended early"
    return (sum(made.values()) - before) / (time.perf_counter() - began_s)


if __name__ == "__main__":
    typer.run(main)
