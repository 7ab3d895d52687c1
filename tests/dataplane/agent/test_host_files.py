"""An agent's files in host memory: never the same name, gone at the end, and after an agent that was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dataplane.agent.host_files import HostFiles
from dataplane.agent.settings import WorkerSettings
from dataplane.memory.model_cache import HostMemoryError
from tests.dataplane.replay_node import settings


def files(folder: Path | None, boot_id: str = "boot") -> HostFiles:
    return HostFiles(settings(cache_dir=folder), boot_id)


def test_kv_files_are_new_each_time_and_gone_at_the_end(tmp_path: Path) -> None:
    ours = files(tmp_path)
    ours.open()
    made = [ours.new_kv_file(worker) for worker in (0, 0, 1)]
    assert len(set(made)) == 3
    for path in made:
        path.touch(exist_ok=False)
    ours.models.mkdir()
    ours.close()
    assert [path for path in made if path.exists()] == []
    assert ours.models.exists(), "a folder that was given keeps its models"
    ours.close()


def test_without_a_folder_everything_goes() -> None:
    ours = files(None, boot_id=f"test-{os.getpid()}")
    ours.open()
    ours.models.mkdir()
    assert ours.models.parent == ours.new_kv_file(0).parent
    ours.close()
    assert not ours.models.parent.exists()


def test_the_next_agent_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from tests.dataplane.agent.test_host_files import files;"
        f"ours = files(Path({str(tmp_path)!r}), 'killed'); ours.open(); ours.new_kv_file(0).touch();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "agent-killed").exists()
    alive, next_one = files(tmp_path, "alive"), files(tmp_path, "next")
    alive.open()
    assert not (tmp_path / "agent-killed").exists()
    kept = alive.new_kv_file(0)
    kept.touch()
    next_one.open()
    assert kept.exists()
    alive.close()
    next_one.close()


@pytest.mark.parametrize(("free_bytes", "expected"), [(2**20, 2**20), (2**20 - 1, 2**20 - 1), (1, 1)])
def test_a_cache_larger_than_its_file_system_is_made_smaller_with_a_warning(
    free_bytes: int, expected: int, tmp_path: Path
) -> None:
    ours = HostFiles(settings(cache_dir=tmp_path), "boot", available=lambda *_: free_bytes)
    with capture_logs() as logs:
        ours.open()
    ours.close()
    assert ours.cache_bytes == expected
    warnings = [(line["cache_bytes"], line["free_bytes"], line["folder"]) for line in logs]
    assert warnings == ([] if expected == 2**20 else [(2**20, free_bytes, str(tmp_path))])


def test_the_kv_of_prefill_workers_takes_space_from_the_models(tmp_path: Path) -> None:
    kv_bytes = 2**19
    pair: Any = (WorkerSettings(gpus=1, memory_bytes=2**22),) * 2
    split = settings(cache_dir=tmp_path, split=True, slots=pair, host_kv_bytes=kv_bytes)
    ours = HostFiles(split, "boot", available=lambda *_: 2**20)
    ours.open()
    assert ours.cache_bytes == 2**20 - kv_bytes
    ours.close()
    with pytest.raises(HostMemoryError, match=f"no space for models: {kv_bytes} bytes are free, and host_kv_bytes"):
        HostFiles(split, "next", available=lambda *_: kv_bytes).open()
