"""The sections of the GPU benchmark. Each runs in a process of its own, so that what it breaks, also a CUDA context, is
broken for it alone: `python -m ops.bench.engine.gpu_sections NAME FOLDER`, with the plan in the folder.

A section writes what it found into the folder, or why it was skipped. Checkpoints are there for those after it.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, get_args

import msgspec
import torch

from dataplane.engines.core.kv import KvEvents
from ops.bench.engine.gpu_figures import copy_rate, measure_decodes, measure_products, measure_starts, measure_switches
from ops.bench.engine.handover import measure_waits
from ops.bench.engine.node import devices_here, measure_node
from ops.bench.engine.quantized import FORMATS, quantized
from ops.bench.engine.vllm_serve import MissingVllmError, VllmSetup, check_vllm, measure_vllm
from ops.profiling.checkpoints import BenchModel, DtypeName, Shape, build_checkpoints, shape_of

ROOT = Path(__file__).parents[3]
PLAN, CHECKPOINTS = "plan.json", "checkpoints"
TESTS = ROOT / "tests" / "gpu"
VLLM_TESTS = TESTS / "test_vllm_cuda.py"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and of what: a model that decodes, and two of one shape that are switched. `prompts`: lengths
    of those whose first token is timed after a switch. `streams`: how many there are at once in the sections that send
    requests by HTTP. `product`: outputs and inputs of the layer. `rounds` and `draws`: of which medians are told.
    """

    device: str
    dtype: DtypeName
    decoded: Shape
    switched: Shape
    rounds: int
    draws: int
    vllm_python: str
    context_tokens: int = 24_576
    copy_bytes: int = 2**32
    step_tokens: int = 8192
    threads: tuple[int, ...] = (1, 4, 16)
    prompts: tuple[int, ...] = (512, 4_000, 10_000, 20_000)
    sequences: tuple[int, ...] = (1, 16, 64, 128)
    decode_prompt_tokens: int = 512
    rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    product: tuple[int, int] = (14_336, 4_096)
    handovers: int = 8
    handed_tokens: int = 4_000
    streams: tuple[int, ...] = (1, 16, 64)
    stream_prompt_tokens: int = 256
    stream_tokens: int = 128
    kv_bytes: int = 2**34

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"


def gpu_plan(device: str, decoded: int, switched: int, *, rounds: int, draws: int, vllm_python: str) -> Plan:
    """Of models with so many parameters."""
    return Plan(
        device=device,
        dtype="bfloat16",
        decoded=shape_of(decoded),
        switched=shape_of(switched),
        rounds=rounds,
        draws=draws,
        vllm_python=vllm_python,
    )


def cpu_plan(*, rounds: int, draws: int, vllm_python: str) -> Plan:
    """The same with shapes so small that a CPU comes to the end of it."""
    tiny = Shape(hidden=128, layers=2, head_dim=32)
    return Plan(
        device="cpu",
        dtype="float32",
        decoded=tiny,
        switched=tiny,
        rounds=rounds,
        draws=draws,
        vllm_python=vllm_python,
        context_tokens=1024,
        copy_bytes=2**24,
        step_tokens=256,
        threads=(1, 2),
        prompts=(64, 256),
        sequences=(1, 4),
        decode_prompt_tokens=32,
        rows=(1, 8),
        product=(256, 128),
        handovers=2,
        handed_tokens=200,
        streams=(1, 4),
        stream_prompt_tokens=32,
        stream_tokens=16,
        kv_bytes=2**26,
    )


class SkippedError(Exception):
    """Why a section has nothing to measure here."""


def _checkpoints(plan: Plan, folder: Path) -> dict[str, Any]:
    built = partial(build_checkpoints, dtype=plan.dtype, device=plan.device, context_tokens=plan.context_tokens)
    target = folder / CHECKPOINTS
    models = [*built(target / "pair", [plan.switched] * 2), *built(target / "decoded", [plan.decoded])]
    return {"models": [asdict(model) | {"folder": str(model.folder)} for model in models]}


def _models(folder: Path) -> tuple[list[BenchModel], BenchModel]:
    """The two that are switched, and the one that decodes."""
    try:
        found = msgspec.json.decode((folder / f"{CHECKPOINTS}.json").read_bytes())["found"]["models"]
    except (FileNotFoundError, KeyError) as error:
        raise SkippedError("there are no checkpoints: that section failed, or was not run") from error
    *pair, decoded = [BenchModel(**row | {"folder": Path(row["folder"])}) for row in found]
    return pair, decoded


def _devices(plan: Plan) -> list[str]:
    return [plan.device] if plan.on_cpu else [f"cuda:{index}" for index in range(devices_here(plan.device))]


def _one_device(plan: Plan) -> list[str]:
    return ["a second device: there is one here"] if len(_devices(plan)) == 1 else []


def _switches(plan: Plan, folder: Path) -> dict[str, Any]:
    pair, _ = _models(folder)
    rows = measure_switches(pair, devices=_devices(plan), dtype=plan.dtype, rounds=plan.rounds, threads=plan.threads)
    return {"switches": list(rows), "skipped": _one_device(plan)}


def _starts(plan: Plan, folder: Path) -> dict[str, Any]:
    pair, _ = _models(folder)
    device = _devices(plan)[0]
    (switch, _) = measure_switches(pair, devices=[device], dtype=plan.dtype, rounds=plan.rounds, threads=(1,))
    rows = measure_starts(
        pair,
        switch["details"]["switch_s"],
        device=device,
        dtype=plan.dtype,
        rounds=plan.rounds,
        prompts=plan.prompts,
        step_tokens=plan.step_tokens,
    )
    return {"starts": list(rows)}


def _decodes(plan: Plan, model: BenchModel, bytes_per_s: float) -> list[dict[str, Any]]:
    rows = measure_decodes(
        model,
        plan.decoded,
        device=plan.device,
        dtype=plan.dtype,
        rounds=plan.rounds,
        sequences=plan.sequences,
        prompt_tokens=plan.decode_prompt_tokens,
        step_tokens=plan.step_tokens,
        bytes_per_s=bytes_per_s,
    )
    return list(rows)


def _dense(plan: Plan, folder: Path) -> dict[str, Any]:
    _, decoded = _models(folder)
    bytes_per_s = copy_rate(torch.device(plan.device), plan.copy_bytes)
    return {
        "copy_bytes_per_s": bytes_per_s,
        "decodes": _decodes(plan, decoded, bytes_per_s),
        "skipped": ["CUDA graphs: a CPU has none, so both columns run without"] if plan.on_cpu else [],
    }


def _quantized(plan: Plan, folder: Path) -> dict[str, Any]:
    _, decoded = _models(folder)
    outputs, inputs = plan.product
    products = measure_products(device=plan.device, rounds=plan.rounds, rows=plan.rows, outputs=outputs, inputs=inputs)
    found: dict[str, Any] = {"products": list(products), "decodes": []}
    bytes_per_s = copy_rate(torch.device(plan.device), plan.copy_bytes)
    for form in FORMATS:
        small = quantized(decoded, form, folder / "quantized")
        found["decodes"] += [{"format": form, **row} for row in _decodes(plan, small, bytes_per_s)]
        rmtree(small.folder)
    return found


def _handovers(plan: Plan, folder: Path) -> dict[str, Any]:
    pair, _ = _models(folder)
    ways: tuple[KvEvents, ...] = ("off", "host") if plan.on_cpu else get_args(KvEvents)
    rows = measure_waits(
        pair[0],
        plan.switched,
        folder,
        ways=ways,
        device=plan.device,
        dtype=plan.dtype,
        requests=plan.handovers,
        prompt_tokens=plan.handed_tokens,
        rounds=plan.rounds,
    )
    skipped = ["KV events of the device: a CPU has none"] if plan.on_cpu else []
    return {"handovers": list(rows), "skipped": skipped + _one_device(plan)}


def _node(plan: Plan, folder: Path) -> dict[str, Any]:
    pair, _ = _models(folder)
    found = measure_node(
        pair,
        folder,
        device=plan.device,
        dtype=plan.dtype,
        loads=plan.streams,
        draws=plan.draws,
        prompt_tokens=plan.stream_prompt_tokens,
        max_tokens=plan.stream_tokens,
    )
    return {**found, "skipped": _one_device(plan)}


def _vllm(plan: Plan, folder: Path) -> dict[str, Any]:
    _, decoded = _models(folder)
    setup = VllmSetup(
        python=Path(plan.vllm_python), device=plan.device, dtype=plan.dtype, kv_bytes=plan.kv_bytes, folder=folder
    )
    try:
        version = check_vllm(setup.python)
    except MissingVllmError as error:
        raise SkippedError(str(error)) from error
    rows = measure_vllm(
        decoded,
        setup,
        loads=plan.streams,
        draws=plan.draws,
        prompt_tokens=plan.stream_prompt_tokens,
        max_tokens=plan.stream_tokens,
    )
    skipped = ["compiling and capturing: a CPU does neither, on both sides"] if plan.on_cpu else []
    return {"version": version, "streams": rows, "skipped": skipped}


def _tests(plan: Plan, folder: Path) -> dict[str, Any]:
    """The tests that need a GPU: those of the torch engine, and vLLM's in its environment."""
    rows = [_pytest("torch", sys.executable, [str(TESTS), f"--ignore={VLLM_TESTS}", "-n0"])]
    try:
        check_vllm(Path(plan.vllm_python))
    except MissingVllmError as error:
        return {"tests": rows, "skipped": [f"{VLLM_TESTS.name}: {error}"]}
    options = [str(VLLM_TESTS), f"--confcutdir={TESTS}", "-o", "filterwarnings=default"]
    return {"tests": [*rows, _pytest("vLLM", plan.vllm_python, options)]}


def _pytest(environment: str, python: str, options: list[str]) -> dict[str, Any]:
    """Run tests; how many passed, failed and were skipped, which failed and why others were skipped."""
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-rfEs", "--durations=0", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    counts = {
        name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", " ".join(lines[-1:]))
    }
    if not counts:
        raise RuntimeError(f"pytest ended with status {run.returncode}: {(run.stdout + run.stderr)[-1000:]}")
    return {
        "environment": environment,
        **{name: counts.get(name, 0) for name in ("passed", "failed", "error", "skipped")},
        "failures": [line for line in lines if line.startswith(("FAILED ", "ERROR "))],
        "why_skipped": sorted({line.rpartition(": ")[2] for line in lines if line.startswith("SKIPPED ")}),
    }


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section: what it is about, the seconds that it may take, and those that it is thought to take on an H200 (an
    estimate of parts that were measured there; none has run there as a whole).
    """

    about: str
    limit_s: float
    estimate_s: float
    run: Callable[[Plan, Path], Mapping[str, Any]]


SECTIONS = {
    CHECKPOINTS: Section(about="Checkpoints of random weights", limit_s=120, estimate_s=30, run=_checkpoints),
    "switches": Section(about="Switches against the measured wire", limit_s=60, estimate_s=30, run=_switches),
    "starts": Section(about="First tokens after a switch", limit_s=75, estimate_s=35, run=_starts),
    "decodes": Section(about="Decode steps against the memory's floor", limit_s=100, estimate_s=60, run=_dense),
    "node": Section(about="A node: agent, worker, HTTP, heartbeats", limit_s=100, estimate_s=60, run=_node),
    "vllm": Section(about="The vLLM engine against vLLM's own server", limit_s=260, estimate_s=170, run=_vllm),
    "tests": Section(about="Tests that need a GPU", limit_s=150, estimate_s=75, run=_tests),
    "handovers": Section(about="Handed over from worker to worker", limit_s=90, estimate_s=40, run=_handovers),
    "quantized": Section(about="Packed weights", limit_s=120, estimate_s=70, run=_quantized),
}
"""In the order in which they run: what depends on none after it, and what matters most, first."""
CPU_LIMIT_FACTOR = 10.0
"""A CPU may take so many times longer."""


def main(name: str, folder: Path) -> None:
    """Run one section, whose plan is in the folder, and write what it found there."""
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    began_s = time.monotonic()
    try:
        found: dict[str, Any] = {"found": SECTIONS[name].run(plan, folder)}
    except SkippedError as error:
        found = {"skipped": str(error)}
    found["took_s"] = time.monotonic() - began_s
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
