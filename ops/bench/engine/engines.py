"""The torch engine against vLLM on one machine: tokens per second at several loads, and switches between two models.

Run it where both engines are installed, such as the environment of `make test-vllm`. Both get the same checkpoints,
prompts, dtype and threads; runs alternate between them. A switch is the additional TTFT of a request whose model must
be loaded in the place of another, against one whose model is resident: weights from host memory, and for vLLM nothing
else, since the other model has no requests.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Annotated, Any

import torch
import typer

from dataplane.engines.interface import Engine, EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.vllm.interfaces import prepare_process
from dataplane.engines.vllm.version import check_version, installed_version
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.schedule import TurnSettings
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.profiling.checkpoints import VOCABULARY, BenchModel, DtypeName, build_checkpoints, parameters_of, shape_of
from ops.profiling.decode import PROMPT_TOKENS, STEP_TOKENS_MAX, TOKENS, engine_run
from ops.profiling.figures import interleaved, medians

SWITCH_PROMPT_TOKENS = 16
Runs = Mapping[str, Callable[[], float]]


@dataclass(frozen=True, kw_only=True)
class EngineFigure:
    """The median of a quantity for each engine."""

    name: str
    unit: str
    torch: float
    vllm: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both engines run on, and how often each figure is measured. `mixed`: whether the torch engine prefills
    prompts beside its batch, as vLLM always does. `report` is called after each run.
    """

    device: str
    dtype: DtypeName
    rounds: int
    mixed: bool
    report: Callable[[str], None]

    @contextmanager
    def engines(self, models: Sequence[BenchModel], *, batch_max: int) -> Iterator[dict[str, Engine]]:
        """Open both engines with the same models, memory for one model at a time, and the same limits."""
        from dataplane.engines.vllm.engine import VllmEngine  # noqa: PLC0415
        from dataplane.engines.vllm.settings import VllmEngineSettings  # noqa: PLC0415

        largest_bytes = max(model.weights_bytes for model in models)
        same: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "weights_bytes": largest_bytes + largest_bytes // 8,
            "kv_bytes": 2 * largest_bytes,
            "batch_max": batch_max,
            "prefill_tokens_per_step_max": STEP_TOKENS_MAX,
            "prefix_cache": False,  # each round has the same prompts
        }
        turns = TurnSettings(mixed_batches=self.mixed)
        ours = TorchEngine(TorchEngineSettings(**same, turns=turns), time.monotonic)
        theirs = VllmEngine(VllmEngineSettings(**same, models_max=len(models)), time.monotonic)
        with closing(ours), closing(theirs):
            engines: dict[str, Engine] = {"torch": ours, "vllm": theirs}
            for name, engine in engines.items():
                for model in models:
                    began_s = time.perf_counter()
                    engine.load(model.name, model.spec)
                    self.report(f"{name}: {model.name} loaded in {time.perf_counter() - began_s:.1f} s")
            yield engines

    def medians_of(self, about: str, unit: str, runs: Runs) -> dict[str, float]:
        """The median of each engine's runs, which alternate."""

        def reported(engine: str, run: Callable[[], float]) -> float:
            value = run()
            self.report(f"{about}, {engine}: {value:.4g} {unit}")
            return value

        return medians(
            interleaved({name: partial(reported, name, run) for name, run in runs.items()}, rounds=self.rounds)
        )


def measure_rates(setup: Setup, model: BenchModel, loads: Sequence[int]) -> list[EngineFigure]:
    """Tokens per second of so many simultaneous requests, from the first token to the last, prefills included. On a CPU
    also per second of CPU time, which varies less beside other work.
    """
    chance = random.Random(0)
    clocks = {"tokens/s": time.perf_counter} | ({"tokens/CPU s": time.process_time} if setup.device == "cpu" else {})
    figures = []
    with setup.engines([model], batch_max=max(loads)) as engines:
        for sequences in loads:
            prompts = [tuple(chance.choices(range(VOCABULARY), k=PROMPT_TOKENS)) for _ in range(sequences)]
            about = f"{sequences} sequences at once"
            for unit, clock in clocks.items():
                runs = {
                    name: _rate(engine_run(engine, model, prompts, clock=clock)) for name, engine in engines.items()
                }
                figures.append(EngineFigure(name=about, unit=unit, **setup.medians_of(about, unit, runs)))
    return figures


def measure_switch(setup: Setup, models: Sequence[BenchModel]) -> list[EngineFigure]:
    """TTFT of a resident model, and the additional TTFT when another model was resident."""
    numbers = count()
    with setup.engines(models, batch_max=1) as engines:

        def first_token_s(about: str, asked: Sequence[BenchModel]) -> dict[str, float]:
            runs = {name: partial(_first_token_s, engine, asked, numbers) for name, engine in engines.items()}
            return setup.medians_of(about, "s", runs)

        resident = first_token_s("first token, model there", [models[0], models[0]])
        away = first_token_s("first token, model away", models)
    switch = {name: away[name] - resident[name] for name in resident}
    return [
        EngineFigure(name="first token, model there", unit="s", **resident),
        EngineFigure(name="switch", unit="s", **switch),
    ]


def _rate(run: Callable[[], list[list[float]]]) -> Callable[[], float]:
    def tokens_per_s() -> float:
        stamps = sorted(time_s for times_s in run() for time_s in times_s)
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])

    return tokens_per_s


def _first_token_s(engine: Engine, models: Sequence[BenchModel], numbers: "count[int]") -> float:
    """Seconds of a request for one token of the last model, after one request of each model before it."""
    took_s = 0.0
    for model in models:
        prompt = tuple(range(3, 3 + SWITCH_PROMPT_TOKENS))
        request = EngineRequest(
            request_id=f"switch-{next(numbers)}", instance_id=model.name, tier=Tier.IW_F, prompt=prompt, max_tokens=1
        )
        began_s = time.perf_counter()
        engine.add(request)
        while engine.has_work():
            engine.step()
        took_s = time.perf_counter() - began_s
    return took_s


def measure_engines(setup: Setup, parameters: int, loads: Sequence[int]) -> list[EngineFigure]:
    """All figures, of models with about so many parameters."""
    with work_folder() as folder:
        models = build_checkpoints(folder, [shape_of(parameters)] * 2, setup.dtype)
        return measure_rates(setup, models[0], loads) + measure_switch(setup, models)


def main(
    parameters: Annotated[str, typer.Option(help="Of each model, such as 10M or 7B.")] = "10M",
    load: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once. May be repeated.")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, of which the median is shown.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of a CPU.")] = 1,
    mixed: Annotated[bool, typer.Option(help="The torch engine prefills prompts beside its batch, as vLLM.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the torch engine and vLLM side by side: tokens/s at 1, 16 and 64 sequences, and a switch.

    \b
    Example (needs both engines; `make test-vllm` makes such an environment):
      .venv-vllm/bin/python -m ops.bench.engine.engines --json > engines.json
      .venv-vllm/bin/python -m ops.bench.engine.engines --parameters 30M --load 1 --load 16 --rounds 2 --mixed
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
    began_s = time.perf_counter()
    setup = Setup(
        device=device,
        dtype="float32" if dtype == "float32" else "bfloat16",
        rounds=rounds,
        mixed=mixed,
        report=lambda text: notes().print(f"{time.perf_counter() - began_s:4.0f} s  {text}", markup=False),
    )
    figures = [asdict(figure) for figure in measure_engines(setup, size, load or [1, 16, 64])]
    about = f"{parameters} parameters, {dtype} on {device}, prompts of {PROMPT_TOKENS}, answers of {TOKENS} tokens"
    about += ", prompts beside the batch" if mixed else ""
    if as_json:
        print_json({"vllm": installed_version(), "about": about, "threads": threads, "figures": figures})
        return
    columns: Columns = {"figure": "name", "unit": "unit", "torch": _short("torch"), "vLLM": _short("vllm")}
    print_table(f"torch engine and vLLM {installed_version()}: {about}", columns, figures)


def _short(engine: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[engine]:.4g}"


if __name__ == "__main__":
    typer.run(main)
