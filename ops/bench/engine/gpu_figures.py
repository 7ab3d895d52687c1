"""The figures of the torch engine on a device: the rate of a copy within it, decode steps against the bytes they must
read, the products of packed weights, switches by device and number of copying threads, and the first token after one.

The floor of a decode step is its weights and KV over the rate of a large copy within the device, which reads and
writes.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from ops.bench.engine.quantized import FORMATS, layer_of
from ops.profiling.checkpoints import VOCABULARY, BenchModel, DtypeName, Shape
from ops.profiling.decode import decode_rate, engine_run
from ops.profiling.figures import interleaved, medians, seconds
from ops.profiling.layerwise import measure_layerwise
from ops.profiling.switch import measure_prefetch, measure_switch

LAYERS = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def copy_rate(device: torch.device, copy_bytes: int) -> float:
    """Bytes per second of a large copy within the device, read and written."""
    source = torch.randint(255, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = medians(interleaved({"copy": lambda: seconds(lambda: target.copy_(source), device)}, rounds=9))
    return 2 * copy_bytes / times["copy"]


def measure_decodes(
    model: BenchModel,
    shape: Shape,
    *,
    device: str,
    dtype: DtypeName,
    rounds: int,
    sequences: Sequence[int],
    prompt_tokens: int,
    step_tokens: int,
    bytes_per_s: float,
) -> Iterator[dict[str, Any]]:
    """Tokens per second by the number of sequences, each with a prompt of `prompt_tokens`."""
    kv_token_bytes = 2 * shape.layers * shape.config["num_key_value_heads"] * shape.head_dim * ITEM_BYTES[dtype]
    arms: dict[str, TorchEngine] = {}
    for name, has_graphs in (("graphs", True), ("no_graphs", False)):
        settings = TorchEngineSettings(
            device=device,
            dtype=dtype,
            weights_bytes=model.weights_bytes + 2**30,
            kv_bytes=int(1.3 * max(sequences) * (prompt_tokens + 64) * kv_token_bytes) + 2**30,
            prefill_tokens_per_step_max=step_tokens,
            batch_max=max(sequences),
            prefix_cache=False,
            cuda_graphs=has_graphs,
        )
        arms[name] = TorchEngine(settings, time.monotonic)
        arms[name].load(model.name, model.spec)
    with closing(arms["graphs"]), closing(arms["no_graphs"]):
        for count in sequences:
            chance = random.Random(count)
            prompts = [tuple(chance.choices(range(VOCABULARY), k=prompt_tokens)) for _ in range(count)]
            runs = {name: _rate_of(engine_run(engine, model, prompts, 48 + count)) for name, engine in arms.items()}
            rates = medians(interleaved(runs, rounds=rounds))
            read_bytes = model.weights_bytes + count * prompt_tokens * kv_token_bytes
            floor = count * bytes_per_s / read_bytes
            yield {"sequences": count, **rates, "floor": floor, "share": rates["graphs"] / floor}


def _rate_of(run: Callable[[], list[list[float]]]) -> Callable[[], float]:
    return lambda: decode_rate(run())


def measure_products(
    *, device: str, rounds: int, rows: Sequence[int], outputs: int, inputs: int
) -> Iterator[dict[str, Any]]:
    """One layer's product with packed weights over that in the same type unpacked, by format and number of rows. Layers
    take turns, so that none is found in the cache.
    """
    at = torch.device(device)
    for form, (described, pack) in FORMATS.items():
        layers = [layer_of(described, pack(outputs, inputs), outputs, inputs).to(at) for _ in range(LAYERS)]
        dense = [torch.nn.Linear(inputs, outputs, bias=False, device=at, dtype=torch.bfloat16) for _ in range(LAYERS)]
        for count in rows:
            given = torch.randn(count, inputs, dtype=torch.bfloat16, device=at)
            arms = {"dense": partial(_in_turn, dense, given), "packed": partial(_in_turn, layers, given)}
            times = medians(interleaved({name: partial(seconds, run, at) for name, run in arms.items()}, rounds=rounds))
            yield {"format": form, "rows": count, "packed": times["packed"] / times["dense"]}


@torch.inference_mode()
def _in_turn(layers: Sequence[torch.nn.Module], given: torch.Tensor) -> None:
    for layer in layers:
        layer(given)


def measure_starts(
    models: list[BenchModel],
    load_s: float,
    *,
    device: str,
    dtype: DtypeName,
    rounds: int,
    prompts: Sequence[int],
    step_tokens: int,
) -> Iterator[dict[str, Any]]:
    """The first token after a switch that takes `load_s`, by the length of its prompt. `hidden`: of what can be, since
    nothing is sooner than the longer of load and run. The host submits a model's kernels while its weights are loaded
    in either case.
    """
    for prompt_tokens in prompts:
        found = measure_layerwise(
            models, device=device, dtype=dtype, rounds=rounds, prompt_tokens=prompt_tokens, step_tokens=step_tokens
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


def measure_switches(
    models: list[BenchModel], *, devices: Sequence[str], dtype: DtypeName, rounds: int, threads: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A switch over the measured wire, by device and by threads that copy on the host, and one to a model that was
    prefetched.
    """
    for device in devices:
        for count in threads:
            figure = measure_switch(models, device=device, dtype=dtype, rounds=rounds, threads=count)
            yield {"device": device, "threads": count, **asdict(figure)}
        yield {
            "device": device,
            "threads": threads[0],
            **asdict(measure_prefetch(models, device=device, dtype=dtype, rounds=rounds, threads=threads[0])),
        }
