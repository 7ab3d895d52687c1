"""What a GPU shows, in one run of at most ten minutes: decode steps against the bytes they must read, switches against
the wire, first tokens after a switch by the length of their prompt, packed weights, handovers of KV from worker to
worker, a node from HTTP to heartbeats, the vLLM engine beside vLLM's own server, and the tests that need a GPU.

The sections run one after another, each in a process of its own and with a limit of its time: one that fails takes
nothing from the others. Models have random weights; by default they are for a GPU of 80 GB or more. With `--device cpu`
the same code runs with tiny shapes, which shows that it runs, and nothing of a GPU.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import msgspec
import torch
import typer

from ops.bench.engine.gpu_sections import CHECKPOINTS, CPU_LIMIT_FACTOR, PLAN, ROOT, SECTIONS, Plan, cpu_plan, gpu_plan
from ops.bench.engine.gpu_tables import TABLES
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, output, print_json, print_table
from ops.profiling.checkpoints import parameters_of

CPU_NOTE = "a CPU with tiny shapes: no figure of a GPU"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TAIL_LINES = 25
INTERRUPTED_S = 20.0
"""How long an interrupted section may take to end its processes."""


def run_sections(names: Sequence[str], plan: Plan, folder: Path, *, total_s: float) -> list[dict[str, Any]]:
    """Run sections in their order until `total_s` are over: of each its name, what became of it, and what it found."""
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))
    ends_s = time.monotonic() + total_s
    results = []
    for name in (name for name in SECTIONS if name in names):
        limit_s = SECTIONS[name].limit_s * (CPU_LIMIT_FACTOR if plan.on_cpu else 1.0)
        left_s = ends_s - time.monotonic()
        if left_s < 1:
            result = {"status": "skipped", "why": f"the {total_s:g} s of the whole run were over"}
        else:
            result = _run(name, folder, min(limit_s, left_s))
        notes().print(_line(name, result), markup=False, soft_wrap=True)
        results.append({"section": name, "about": SECTIONS[name].about, **result})
    return results


def _run(name: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one section in a process of its own, and end all that it started."""
    log, written = folder / f"{name}.log", folder / f"{name}.json"
    command = [sys.executable, "-m", "ops.bench.engine.gpu_sections", name, str(folder)]
    began_s = time.monotonic()
    with log.open("wb") as printed:
        process = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=printed, start_new_session=True)
    try:
        status: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
        rmtree(folder / f"{name}-cache", ignore_errors=True)
    took_s = time.monotonic() - began_s
    if status == 0 and written.exists():
        answer = msgspec.json.decode(written.read_bytes())
        if "skipped" in answer:
            return {"status": "skipped", "why": answer["skipped"], "took_s": took_s}
        return {"status": "done", "took_s": took_s, "found": answer["found"]}
    tails = {path.name: _tail(path) for path in sorted(folder.glob(f"{name}*.log"))}
    why = f"it was not done after {limit_s:.0f} s" if status is None else (_tail(log) or ["it printed nothing"])[-1]
    return {"status": "failed", "why": why, "took_s": took_s, "logs": tails}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a section, so that it ends its servers, and kill what is left of its process group, also where the
    section's own process has ended before.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]


def _line(name: str, result: dict[str, Any]) -> str:
    took = f" in {result['took_s']:.0f} s" if "took_s" in result else ""
    about = f": {result['why']}" if "why" in result else ""
    return f"{name}: {result['status']}{took}{about}"


def described(plan: Plan) -> dict[str, Any]:
    """The device, and the versions of what runs on it."""
    name = "CPU" if plan.on_cpu else torch.cuda.get_device_name(plan.device)
    note = CPU_NOTE if plan.on_cpu else None
    return {"device": name, "torch": torch.__version__, "dtype": plan.dtype, "note": note}


def skipped_of(results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """All that was not measured, and why."""
    rows = []
    for result in results:
        if "why" in result:
            rows.append({"section": result["section"], "what": result["status"], "why": result["why"]})
        for one in result.get("found", {}).get("skipped", []):
            what, _, why = one.partition(": ")
            rows.append({"section": result["section"], "what": what, "why": why})
    return rows


def failed(results: Sequence[dict[str, Any]]) -> bool:
    """Whether a section or a test failed."""
    tests = [row for result in results for row in result.get("found", {}).get("tests", [])]
    return any(result["status"] == "failed" for result in results) or any(row["failures"] for row in tests)


def main(
    decoded: Annotated[str, typer.Option(help="Parameters of the model that decodes, on a GPU.")] = "7B",
    switched: Annotated[str, typer.Option(help="Parameters of each of the two that are switched, on a GPU.")] = "3B",
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure within a process; medians are told.")] = 3,
    draws: Annotated[int, typer.Option(min=1, help="Of each load by HTTP; medians are told.")] = 3,
    device: Annotated[str, typer.Option(help="cuda, or cpu with tiny shapes.")] = "cuda",
    section: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(SECTIONS)}.")] = None,
    vllm_python: Annotated[Path, typer.Option(help="An interpreter with vLLM.")] = VLLM_PYTHON,
    total_s: Annotated[float, typer.Option(min=1, help="Limit of the whole run; on a GPU.")] = 580.0,
    as_json: AsJson = False,
) -> None:
    """Most of what a GPU is needed for, section by section: not several GPUs for one model, remapping or swapping under
    load, nor adapters. Exit status 1 if one or a test failed.

    \b
    Examples:
      make gpu
      TMPDIR=/dev/shm python -m ops.bench.engine.gpu --decoded 7B --switched 3B --json
      python -m ops.bench.engine.gpu --device cpu --section switches --section vllm
    """
    names = [CHECKPOINTS, *chosen(section, SECTIONS, "--section")]
    python = str(vllm_python.absolute())
    if device == "cpu":
        plan, total_s = cpu_plan(rounds=rounds, draws=draws, vllm_python=python), CPU_LIMIT_FACTOR * total_s
    else:
        plan = _gpu_plan(device, decoded, switched, rounds=rounds, draws=draws, vllm_python=python)
    about = described(plan)
    if about["note"]:
        notes().print(f"This is {about['note']}.", markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that whoever ends this ends a section's servers too
    with work_folder() as folder:
        results = run_sections(names, plan, folder, total_s=total_s)
    if as_json:
        print_json({**about, "sections": results})
    else:
        show(about, results)
    if failed(results):
        raise typer.Exit(1)


def _gpu_plan(device: str, decoded: str, switched: str, *, rounds: int, draws: int, vllm_python: str) -> Plan:
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device can be used here; cpu runs tiny shapes", param_hint="--device")
    try:
        sizes = parameters_of(decoded), parameters_of(switched)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--decoded, --switched") from error
    return gpu_plan(device, *sizes, rounds=rounds, draws=draws, vllm_python=vllm_python)


def show(about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Print the tables, what was left out, and the last lines of what failed."""
    for result in results:
        if "found" in result:
            output().print(f"\n{result['about']}, on {about['note'] or about['device']}", markup=False, soft_wrap=True)
            TABLES[result["section"]](result["found"], result["section"])
    columns: Columns = {"section": "section", "what": "what", "why": "why"}
    print_table("Left out or failed", columns, skipped_of(results))
    for result in results:
        for name, lines in result.get("logs", {}).items():
            notes().print(f"\n{name}, the last lines", *lines, sep="\n", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
