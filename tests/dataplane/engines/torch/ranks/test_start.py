"""Ranks as processes: they make the right tokens, and the end of one, or its silence, ends the worker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from tests.dataplane.engines.torch.tiny import greedy_tokens, save_tiny

PROMPT = [5, 17, 33, 8, 90, 41, 12, 60]
PROGRAM = """
import sys, time
from pathlib import Path
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.tiny import spec_of

folder, cache, timeout_s, *prompt = sys.argv[1:]
sizes = {"weights_bytes": 2**19, "kv_bytes": 2**17, "slab_bytes": 2**14}
settings = TorchEngineSettings(**sizes, cache_folder=Path(cache), ranks=2, ranks_timeout_s=float(timeout_s))
engine = TorchEngine(settings, time.monotonic)
engine.load("a", spec_of("a", Path(folder)))
for line in sys.stdin:
    engine.add(request(line.strip(), [int(token) for token in prompt], instance_id="a", ignore_eos=True))
    print(*drain(engine).tokens[line.strip()], flush=True)
engine.close()
print("closed", flush=True)
"""


class Slot:
    """A process with a slot of two ranks."""

    def __init__(self, folder: Path, cache: Path, *, timeout_s: float = 60.0) -> None:
        arguments = [str(folder), str(cache), str(timeout_s), *map(str, PROMPT)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(cache)},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()

    def ask(self, name: str) -> tuple[int, ...]:
        """The tokens of a request."""
        assert self.process.stdout is not None
        self.send(name)
        return tuple(int(token) for token in self.process.stdout.readline().split())

    def rank(self) -> int:
        """The process id of the other rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        [pid] = [int(child) for child in children.split()]
        return pid


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until_ended(pid: int) -> None:
    while not ended(pid):
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_a_slot_closes_its_ranks(folder: Path, tmp_path: Path) -> None:
    with Slot(folder, tmp_path) as slot:
        assert slot.ask("one") == greedy_tokens(folder, PROMPT, 8)
        rank = slot.rank()
        out, _ = slot.process.communicate(timeout=120)
        assert (out, slot.process.returncode) == ("closed\n", 0)
        until_ended(rank)


@pytest.mark.slow
def test_the_end_of_a_rank_ends_the_worker(folder: Path, tmp_path: Path) -> None:
    with Slot(folder, tmp_path) as slot:
        assert len(slot.ask("one")) == 8
        os.kill(slot.rank(), signal.SIGKILL)
        assert slot.process.wait(60) == 1


@pytest.mark.slow
def test_the_end_of_the_worker_ends_its_ranks(folder: Path, tmp_path: Path) -> None:
    with Slot(folder, tmp_path) as slot:
        assert len(slot.ask("one")) == 8
        rank = slot.rank()
        slot.process.kill()
        until_ended(rank)
    assert not list(tmp_path.glob("tidepool*")), "it leaves nothing behind"


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_worker(folder: Path, tmp_path: Path) -> None:
    with Slot(folder, tmp_path, timeout_s=5.0) as slot:
        assert len(slot.ask("one")) == 8
        rank = slot.rank()
        os.kill(rank, signal.SIGSTOP)
        try:
            slot.send("two")
            assert slot.process.wait(60) == 1
        finally:
            os.kill(rank, signal.SIGCONT)
        until_ended(rank)


@pytest.mark.slow
def test_ranks_in_threads_that_nobody_closes_do_not_keep_a_process_from_ending() -> None:
    program = "from tests.dataplane.engines.torch.rank_threads import start_threads; kept = start_threads(1)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
