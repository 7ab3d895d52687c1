"""What LoRA adapters cost the torch engine: bytes beside the base, and the time of decode steps of one batch.

The rows of the batch have no adapter, all the same one, or several; an adapter changes all linear layers. Weights are
random: the time does not depend on their values.
"""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.messages import BaseModel, ModelSpec
from dataplane.protocol.tiers import Tier
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.local.tiny_adapters import build_tiny_adapter
from ops.profiling.checkpoints import BenchModel, build_checkpoints, parameters_of, shape_of
from ops.profiling.figures import interleaved, medians

PROMPT_TOKENS = 32
STEPS = 4


def measure(
    model: BenchModel, folder: Path, *, counts: list[int], rank: int, batch: int, rounds: int
) -> dict[str, Any]:
    """Decode steps with so many adapters in the batch (0: none), over those of the base alone."""
    engine = TorchEngine(
        TorchEngineSettings(
            weights_bytes=model.weights_bytes * 5 // 4,
            kv_bytes=model.weights_bytes,
            adapters_bytes=model.weights_bytes,
            batch_max=batch,
            prefix_cache=False,
        ),
        time.monotonic,
    )
    try:
        base = model.spec
        engine.load("base", base)
        specs = [_adapter(base, folder / f"adapter-{number}", rank) for number in range(max(counts))]
        for spec in specs:
            engine.load(spec.name, spec)
        own_bytes = engine.adapters.used_bytes // len(specs)
        turns = {str(count): partial(_step_s, engine, specs[:count], batch) for count in (0, *counts)}
        steps = medians(interleaved(turns, rounds=rounds))
    finally:
        engine.close()
    return {
        "bytes": own_bytes / model.weights_bytes,
        "steps": {name: took_s / steps["0"] for name, took_s in steps.items()},
    }


def _adapter(base: ModelSpec, folder: Path, rank: int) -> ModelSpec:
    build_tiny_adapter(folder, Path(base.path), rank=rank, alpha=2.0 * rank)
    return ModelSpec(
        name=folder.name,
        path=str(folder),
        weights_bytes=1,
        kv_bytes_per_token=base.kv_bytes_per_token,
        context_tokens=base.context_tokens,
        base=BaseModel(name=base.name, path=base.path, weights_bytes=base.weights_bytes),
    )


def _step_s(engine: TorchEngine, specs: list[ModelSpec], batch: int) -> float:
    """Seconds of one of `STEPS` decode steps of a batch whose rows have these adapters by turns."""
    instances = [spec.name for spec in specs] or ["base"]
    for number in range(batch):
        engine.add(
            EngineRequest(
                request_id=f"r{number}",
                instance_id=instances[number % len(instances)],
                tier=Tier.IW_N,
                prompt=tuple(range(3, 3 + PROMPT_TOKENS)),
                max_tokens=STEPS + 3,
                ignore_eos=True,
            )
        )
    made = 0
    while made < 2 * batch:  # the prefill, and a step before those that are timed
        made += sum(len(output.token_ids) for output in engine.step())
    began_s = time.monotonic()
    for _ in range(STEPS):
        engine.step()
    took_s = time.monotonic() - began_s
    while engine.has_work():
        engine.step()
    return took_s / STEPS


def main(
    model: Annotated[str, typer.Option(help="Parameters of the base, as 90M or 7B.")] = "300M",
    adapters: Annotated[list[int] | None, typer.Option(min=1, help="In the batch. May be repeated.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of each adapter.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure; medians are told.")] = 5,
    as_json: AsJson = False,
) -> None:
    """The bytes of an adapter over its base's, and decode steps with adapters over steps without, in float32 on CPU.

    \b
    Example:
      python -m ops.bench.engine.adapters --model 300M --adapters 1 --adapters 4 --adapters 16
    """
    try:
        shape = shape_of(parameters_of(model))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error
    with work_folder() as folder:
        (made,) = build_checkpoints(folder, [shape], "float32")
        notes().print(f"{rounds} rounds")
        found = measure(made, folder, counts=adapters or [1, 4, 16], rank=rank, batch=batch, rounds=rounds)
    if as_json:
        print_json(found)
        return
    rows = [{"adapters": count, "step": ratio} for count, ratio in found["steps"].items()]
    columns: Columns = {"adapters in the batch": "adapters", "decode step": lambda row: f"{row['step']:.2f}x"}
    print_table(f"An adapter has {found['bytes']:.4f} of its base's bytes", columns, rows)


if __name__ == "__main__":
    typer.run(main)
