"""`make gpu` with programs in the place of nvidia-smi, df and Python, which say what they are given."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
COPIED = ("Makefile", "pyproject.toml", "ops/requirements.lock", "ops/requirements-vllm.lock")
READY = (".venv/.ready", ".venv-vllm/.ready", ".clients/vllm-cuda/.ready")
PYTHON = 'touch ran; test "$1" = -c || echo "threads=$OMP_NUM_THREADS folder=$TMPDIR $*"'
GPU = "-m ops.bench.engine.gpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def make_gpu(
    folder: Path, *options: str, gpu: bool = True, free_gb: int = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run it in a copy where everything is installed."""
    for name in COPIED:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in READY:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    program(folder / ".venv/bin/python", PYTHON)
    program(folder / "bin/nvidia-smi", f"exit {int(not gpu)}")
    program(folder / "bin/df", f"echo tmpfs {free_gb << 20} 0 {free_gb << 20} 0% /dev/shm")
    left_out = ("OMP_NUM_THREADS", "TMPDIR", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    given = inherited | {"PATH": path} | environment
    command = ["make", "gpu", *options, "ARGS=--json"]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=True)


def test_on_a_gpu_it_takes_all_cores_and_the_memory_where_it_has_room(tmp_path: Path) -> None:
    ran = f"{GPU} --vllm-python .clients/vllm-cuda/bin/python --json\n"
    assert make_gpu(tmp_path).stdout == f"threads= folder=/dev/shm {ran}"
    small = make_gpu(tmp_path, free_gb=40)
    assert small.stdout == f"threads= folder= {ran}"
    assert "Checkpoints need 50 GB in /tmp" in small.stderr
    chosen = make_gpu(tmp_path, OMP_NUM_THREADS="3", TMPDIR=str(tmp_path))
    assert chosen.stdout == f"threads=3 folder={tmp_path} {ran}"


def test_without_a_gpu_only_what_the_benchmark_prints_is_on_stdout(tmp_path: Path) -> None:
    ran = make_gpu(tmp_path, gpu=False)
    assert ran.stdout == f"threads=1 folder= {GPU} --device cpu --vllm-python .venv-vllm/bin/python --json\n"
    assert "There is no GPU here" in ran.stderr


@pytest.mark.parametrize("gpu", [True, False])
def test_a_dry_run_runs_nothing(tmp_path: Path, gpu: bool) -> None:
    make_gpu(tmp_path, "-n", gpu=gpu)
    assert not (tmp_path / "ran").exists()
