"""A process of Celery's that ends without a signal restarts under the same process id."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from celery import signals
from controlplane.planner import processes

starts = open({starts!r}, "a")
print(os.getpid(), file=starts, flush=True)
ending = sys.argv[1:][len(open({starts!r}).readlines()) - 1]

def run(arguments):
    print(arguments, file=sys.stderr)
    if ending == "raise":
        raise AttributeError("'NoneType' object has no attribute 'hostname'")
    if ending == "signal":
        signals.worker_shutting_down.send(sender="here", sig="TERM", how="Warm", exitcode=0)

processes.celery.worker_main = run
processes.celery.start = run
processes.{serve}(restart_after_s=0.0)
"""


@pytest.mark.parametrize(
    ("serve", "endings"),
    [
        ("serve_worker", ["raise", "return", "raise", "signal"]),
        ("serve_worker", ["signal"]),
        ("serve_beat", ["raise", "raise", "return"]),
    ],
)
def test_only_a_signal_ends_it(serve: str, endings: list[str], tmp_path: Path) -> None:
    program, starts = tmp_path / "program.py", tmp_path / "starts"
    program.write_text(PROGRAM.format(serve=serve, starts=str(starts)))
    ended = subprocess.run([sys.executable, program, *endings], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    pids = starts.read_text().split()
    assert len(pids) == len(endings)
    assert len(set(pids)) == 1
    assert (ended.stderr + ended.stdout).count("ended without a signal") == len(endings) - 1


def test_a_worker_takes_one_queue(tmp_path: Path) -> None:
    program, starts = tmp_path / "program.py", tmp_path / "starts"
    program.write_text(PROGRAM.format(serve="serve_worker", starts=str(starts)))
    ended = subprocess.run([sys.executable, program, "signal"], capture_output=True, text=True, check=False)
    assert ended.stderr.count("--queues=") == 1
    assert "'--queues=tidepool'" in ended.stderr
