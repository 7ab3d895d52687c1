"""The torch engine against vLLM on one machine: tokens per second at several loads, and switches between two models.

Run it where both engines are, such as the environment that `make test-vllm` makes. Both see the same checkpoints,
prompts, dtype and threads, and take turns. A switch is what the first token of a request costs more when its model has
to come and another to leave than when it is there: weights from host memory, and for vLLM nothing else, since the
other model has no requests.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dataplane.engine import Engine, EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.vllm.interfaces import check_version, prepare_process
from dataplane.errors import ModelLoadError
from ops.bench.checkpoints import VOCABULARY, BenchModel, DtypeName, build_checkpoints, parameters_of, shape_of
from ops.bench.decode import PROMPT_TOKENS, STEP_TOKENS_MAX, engine_run
from ops.bench.figures import interleaved, medians
from ops.commands.screen import Columns, print_json, print_table

SWITCH_PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class EngineFigure:
    """A median for each engine. `name` says of what."""

    name: str
    unit: str
    torch: float
    vllm: float


def measure_rates(
    torch_engine: Engine, vllm_engine: Engine, model: BenchModel, loads: Sequence[int], *, rounds: int
) -> list[EngineFigure]:
    """Tokens per second when so many requests come at once: from the first token to the last, prefills between them."""
    chance = random.Random(0)
    figures = []
    for sequences in loads:
        prompts = [tuple(chance.choices(range(VOCABULARY), k=PROMPT_TOKENS)) for _ in range(sequences)]
        runs = {
            "torch": _rate(engine_run(torch_engine, model, prompts)),
            "vllm": _rate(engine_run(vllm_engine, model, prompts)),
        }
        found = medians(interleaved(runs, rounds=rounds))
        figures.append(EngineFigure(name=f"{sequences} sequences at once", unit="tokens/s", **found))
    return figures


def measure_switch(
    torch_engine: Engine, vllm_engine: Engine, models: Sequence[BenchModel], *, rounds: int
) -> list[EngineFigure]:
    """Seconds to the first token of a model that is there, and what it takes longer when another was there."""
    engines = {"torch": torch_engine, "vllm": vllm_engine}
    numbers = count()
    here = {
        name: lambda engine=engine: _first_token_s(engine, [models[0], models[0]], numbers)
        for name, engine in engines.items()
    }
    away = {name: lambda engine=engine: _first_token_s(engine, models, numbers) for name, engine in engines.items()}
    stays, comes = medians(interleaved(here, rounds=rounds)), medians(interleaved(away, rounds=rounds))
    switch = {name: comes[name] - stays[name] for name in engines}
    return [
        EngineFigure(name="first token, model there", unit="s", **stays),
        EngineFigure(name="switch", unit="s", **switch),
    ]


def _rate(run: Callable[[], list[list[float]]]) -> Callable[[], float]:
    def tokens_per_s() -> float:
        stamps = sorted(time_s for times_s in run() for time_s in times_s)
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])

    return tokens_per_s


def _first_token_s(engine: Engine, models: Sequence[BenchModel], numbers: "count[int]") -> float:
    """How long a request for one token of the last model takes, after one of each model before it."""
    took_s = 0.0
    for model in models:
        prompt = tuple(range(3, 3 + SWITCH_PROMPT_TOKENS))
        request = EngineRequest(
            request_id=f"switch-{next(numbers)}", instance_id=model.name, tier="IW-F", prompt=prompt, max_tokens=1
        )
        began_s = time.perf_counter()
        engine.add(request)
        while engine.has_work():
            engine.step()
        took_s = time.perf_counter() - began_s
    return took_s


def _torch_engine(models: Sequence[BenchModel], device: str, dtype: DtypeName, batch_max: int) -> TorchEngine:
    largest_bytes = max(model.weights_bytes for model in models)
    settings = TorchEngineSettings(
        device=device,
        dtype=dtype,
        weights_bytes=largest_bytes + largest_bytes // 8,
        kv_bytes=2 * largest_bytes,
        batch_max=batch_max,
        prefill_tokens_per_step_max=STEP_TOKENS_MAX,
    )
    return TorchEngine(settings, time.monotonic)


def _vllm_engine(models: Sequence[BenchModel], device: str, dtype: DtypeName, batch_max: int) -> Any:
    from dataplane.engines.vllm.engine import VllmEngine  # noqa: PLC0415
    from dataplane.engines.vllm.settings import VllmEngineSettings  # noqa: PLC0415

    largest_bytes = max(model.weights_bytes for model in models)
    settings = VllmEngineSettings(
        device=device,
        dtype=dtype,
        weights_bytes=largest_bytes + largest_bytes // 8,
        kv_bytes=2 * largest_bytes,
        models_max=len(models),
        batch_max=batch_max,
        prefill_tokens_per_step_max=STEP_TOKENS_MAX,
    )
    return VllmEngine(settings, time.monotonic)


def measure_engines(
    parameters: int, loads: Sequence[int], *, device: str, dtype: DtypeName, rounds: int
) -> list[EngineFigure]:
    """All figures, of models of about so many parameters."""
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder, ExitStack() as stack:
        models = build_checkpoints(Path(folder), [shape_of(parameters)] * 2, dtype)

        def both(held: Sequence[BenchModel]) -> tuple[Engine, Engine]:
            engines = [make(held, device, dtype, max(loads)) for make in (_torch_engine, _vllm_engine)]
            for engine in engines:
                stack.enter_context(closing(engine))
                for model in held:
                    engine.load(model.name, model.spec)
            return engines[0], engines[1]

        rates = measure_rates(*both(models[:1]), models[0], loads, rounds=rounds)
        return rates + measure_switch(*both(models), models, rounds=rounds)


def main(
    parameters: Annotated[str, typer.Option(help="Of each model, such as 30M or 7B.")] = "30M",
    load: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once. May be repeated.")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="That count; their median is told.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of a CPU.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure the torch engine and vLLM side by side.

    \b
    Example (needs both engines; `make test-vllm` makes such an environment):
      .venv-vllm/bin/python -m ops.bench.engines --parameters 30M --load 1 --load 16 --load 64 --json
    """
    if dtype not in {"float32", "bfloat16"}:
        raise typer.BadParameter(f"--dtype must be float32 or bfloat16, not '{dtype}'")
    try:
        check_version()
        size = parameters_of(parameters)
    except (ModelLoadError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    prepare_process(device)
    torch.set_num_threads(threads)
    name: DtypeName = "float32" if dtype == "float32" else "bfloat16"
    figures = measure_engines(size, load or [1, 16, 64], device=device, dtype=name, rounds=rounds)
    if as_json:
        print_json([asdict(figure) for figure in figures])
        return
    columns: Columns = {"figure": "name", "unit": "unit", "torch": _short("torch"), "vLLM": _short("vllm")}
    print_table("torch engine and vLLM", columns, [asdict(figure) for figure in figures])


def _short(engine: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[engine]:.4g}"


if __name__ == "__main__":
    typer.run(main)
