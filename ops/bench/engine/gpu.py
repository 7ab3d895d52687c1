"""What a GPU shows of the torch engine, in one run: decode steps against the bytes they must read, with and without
CUDA graphs, of a dense model and of the same quantized; the products of packed weights by themselves; switches against
the wire; the first token after a switch, layer by layer, by the length of its prompt; and the second token of requests
that one worker prefills and another decodes, by how their KV is waited for.

Models have random weights. The floor of a decode step is its weights and KV over the rate of a large copy within the
device, which reads and writes.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from dataplane.engines.core.kv import KvEvents
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from ops.bench.engine.handover import measure_waits
from ops.bench.engine.quantized import FORMATS, layer_of, quantized
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.profiling.checkpoints import (
    VOCABULARY,
    BenchModel,
    DtypeName,
    Shape,
    build_checkpoints,
    parameters_of,
    shape_of,
)
from ops.profiling.decode import decode_rate, engine_run
from ops.profiling.figures import interleaved, medians, seconds
from ops.profiling.layerwise import measure_layerwise
from ops.profiling.switch import measure_prefetch, measure_switch

DTYPE: DtypeName = "bfloat16"
CONTEXT_TOKENS = 24_576
COPY_BYTES = 2**32
STEP_TOKENS = 8192
SEQUENCES = (1, 16, 64, 128)
PROMPTS = (512, 4_000, 10_000, 20_000)
LAYERS = 16
ROWS = (1, 8, 16, 32, 64, 128)
HANDED_OVER, HANDED_TOKENS = 8, 4_000


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a large copy within the device, read and written."""
    source = torch.randint(255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = medians(interleaved({"copy": lambda: seconds(lambda: target.copy_(source), device)}, rounds=9))
    return 2 * COPY_BYTES / times["copy"]


def measure_decodes(
    model: BenchModel, shape: Shape, *, device: str, rounds: int, prompt_tokens: int, bytes_per_s: float
) -> Iterator[dict[str, Any]]:
    """Tokens per second by the number of sequences, each with a prompt of `prompt_tokens`."""
    kv_token_bytes = 2 * shape.layers * shape.config["num_key_value_heads"] * shape.head_dim * 2
    arms: dict[str, TorchEngine] = {}
    for name, has_graphs in (("graphs", True), ("no_graphs", False)):
        settings = TorchEngineSettings(
            device=device,
            dtype=DTYPE,
            weights_bytes=model.weights_bytes + 2**30,
            kv_bytes=int(1.3 * max(SEQUENCES) * (prompt_tokens + 64) * kv_token_bytes) + 2**30,
            prefill_tokens_per_step_max=STEP_TOKENS,
            batch_max=max(SEQUENCES),
            prefix_cache=False,
            cuda_graphs=has_graphs,
        )
        arms[name] = TorchEngine(settings, time.monotonic)
        arms[name].load(model.name, model.spec)
    with closing(arms["graphs"]), closing(arms["no_graphs"]):
        for sequences in SEQUENCES:
            chance = random.Random(sequences)
            prompts = [tuple(chance.choices(range(VOCABULARY), k=prompt_tokens)) for _ in range(sequences)]
            runs = {name: _rate_of(engine_run(engine, model, prompts, 48 + sequences)) for name, engine in arms.items()}
            rates = medians(interleaved(runs, rounds=rounds))
            read_bytes = model.weights_bytes + sequences * prompt_tokens * kv_token_bytes
            floor = sequences * bytes_per_s / read_bytes
            yield {"sequences": sequences, **rates, "floor": floor, "share": rates["graphs"] / floor}


def _rate_of(run: Callable[[], list[list[float]]]) -> Callable[[], float]:
    return lambda: decode_rate(run())


def measure_products(
    *, device: str, rounds: int, outputs: int = 14_336, inputs: int = 4_096
) -> Iterator[dict[str, Any]]:
    """One layer's product with packed weights over that in the same type unpacked, by format and number of rows. Layers
    take turns, so that none is found in the cache.
    """
    at = torch.device(device)
    for form, (described, pack) in FORMATS.items():
        layers = [layer_of(described, pack(outputs, inputs), outputs, inputs).to(at) for _ in range(LAYERS)]
        dense = [torch.nn.Linear(inputs, outputs, bias=False, device=at, dtype=torch.bfloat16) for _ in range(LAYERS)]
        for rows in ROWS:
            given = torch.randn(rows, inputs, dtype=torch.bfloat16, device=at)
            arms = {"dense": partial(_in_turn, dense, given), "packed": partial(_in_turn, layers, given)}
            times = medians(interleaved({name: partial(seconds, run, at) for name, run in arms.items()}, rounds=rounds))
            yield {"format": form, "rows": rows, "packed": times["packed"] / times["dense"]}


@torch.inference_mode()
def _in_turn(layers: Sequence[torch.nn.Module], given: torch.Tensor) -> None:
    for layer in layers:
        layer(given)


def measure_starts(models: list[BenchModel], load_s: float, *, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The first token after a switch that takes `load_s`, by the length of its prompt. `hidden`: of what can be, since
    nothing is sooner than the longer of load and run. The host submits a model's kernels while its weights are loaded
    in either case.
    """
    for prompt_tokens in PROMPTS:
        found = measure_layerwise(
            models, device=device, dtype=DTYPE, rounds=rounds, prompt_tokens=prompt_tokens, step_tokens=STEP_TOKENS
        )
        whole_s, layerwise_s, run_s = (found.details[name] for name in ("load_then_run_s", "layerwise_s", "run_s"))
        hidable_s = whole_s - max(load_s, run_s)
        yield {
            "prompt_tokens": prompt_tokens,
            "whole_s": whole_s,
            "layerwise_s": layerwise_s,
            "run_s": run_s,
            "hidden": (whole_s - layerwise_s) / hidable_s if hidable_s > 0 else None,
        }


def measure(decoded: int, switched: int, folder: Path, *, device: str, rounds: int) -> dict[str, Any]:
    """All figures, of a model of `decoded` parameters and of two of `switched`."""
    bytes_per_s = copy_rate(torch.device(device))
    found: dict[str, Any] = {"copy_bytes_per_s": bytes_per_s}
    built = partial(build_checkpoints, dtype=DTYPE, device=device, context_tokens=CONTEXT_TOKENS)
    pair = built(folder / "pair", [shape_of(switched)] * 2)
    notes().print("switches")
    for name, figure in (("switch", measure_switch), ("prefetch", measure_prefetch)):
        found[name] = asdict(figure(pair, device=device, dtype=DTYPE, rounds=rounds))
    notes().print("layer-wise starts")
    found["starts"] = list(measure_starts(pair, found["switch"]["details"]["switch_s"], device=device, rounds=rounds))
    notes().print("handovers")
    found["handovers"] = list(
        measure_waits(
            pair[0],
            shape_of(switched),
            folder,
            ways=get_args(KvEvents),
            device=device,
            dtype=DTYPE,
            requests=HANDED_OVER,
            prompt_tokens=HANDED_TOKENS,
            rounds=rounds,
        )
    )
    notes().print("decode steps")
    (model,) = built(folder / "decoded", [shape_of(decoded)])
    found["decodes"] = list(
        measure_decodes(
            model, shape_of(decoded), device=device, rounds=rounds, prompt_tokens=512, bytes_per_s=bytes_per_s
        )
    )
    notes().print("packed weights")
    found["products"] = list(measure_products(device=device, rounds=rounds))
    found["quantized_decodes"] = []
    for form in FORMATS:
        small = quantized(model, form, folder / form.partition(",")[0])
        shape = shape_of(decoded)
        rows = measure_decodes(small, shape, device=device, rounds=rounds, prompt_tokens=512, bytes_per_s=bytes_per_s)
        found["quantized_decodes"] += [{"format": form, **row} for row in rows]
    return found


def main(
    decoded: Annotated[str, typer.Option(help="Parameters of the model that decodes.")] = "7B",
    switched: Annotated[str, typer.Option(help="Parameters of each of the two models that are switched.")] = "3B",
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure; medians are told.")] = 5,
    device: Annotated[str, typer.Option(help="A CUDA device.")] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Decode steps, switches, layer-wise starts and handovers of the torch engine on a GPU.

    \b
    Example:
      TMPDIR=/dev/shm python -m ops.bench.engine.gpu --decoded 7B --switched 3B
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device can be used here", param_hint="--device")
    try:
        sizes = parameters_of(decoded), parameters_of(switched)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--decoded, --switched") from error
    with work_folder() as folder:
        found = measure(*sizes, folder, device=device, rounds=rounds)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    for name in ("switch", "prefetch"):
        figure = found[name]
        notes().print(f"{figure['name']}: {figure['value']:.3f} ({figure['bound']} {figure['target']:g})")
    seconds_of: Columns = {
        "prompt": "prompt_tokens",
        "load, then run, s": lambda row: f"{row['whole_s']:.3f}",
        "layer by layer, s": lambda row: f"{row['layerwise_s']:.3f}",
        "run, s": lambda row: f"{row['run_s']:.3f}",
        "hidden of what can be": lambda row: "-" if row["hidden"] is None else f"{row['hidden']:.0%}",
    }
    print_table("First token after a switch", seconds_of, found["starts"])
    handovers: Columns = {
        "KV is waited for": "kv_events",
        "prompt": "prompt_tokens",
        "second token after, s": lambda row: f"{row['gap_s']:.4f}",
        "longest, s": lambda row: f"{row['longest_s']:.4f}",
        "copies waited for": lambda row: ", ".join(f"{name} {count}" for name, count in row["waited_for"].items()),
    }
    print_table("Handed over from worker to worker", handovers, found["handovers"])
    rates: Columns = {
        "sequences": "sequences",
        "tokens/s": lambda row: f"{row['graphs']:,.0f}",
        "without graphs": lambda row: f"{row['no_graphs']:,.0f}",
        "memory's floor": lambda row: f"{row['floor']:,.0f}",
        "share of it": lambda row: f"{row['share']:.0%}",
    }
    print_table(f"Decode, copies at {found['copy_bytes_per_s'] / 1e12:.2f} TB/s", rates, found["decodes"])
    print_table("Decode, quantized", {"format": "format", **rates}, found["quantized_decodes"])
    products: Columns = {"format": "format", "rows": "rows", "packed": lambda row: f"{row['packed']:.2f}x"}
    print_table("A layer's product with packed weights over that in bfloat16", products, found["products"])


if __name__ == "__main__":
    typer.run(main)
