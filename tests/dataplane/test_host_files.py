"""An agent's files in host memory: never the same name, gone at the end, and after an agent that was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from dataplane.host_files import HostFiles
from tests.dataplane.replay_node import settings


def files(folder: Path | None, boot_id: str = "boot") -> HostFiles:
    return HostFiles(settings(cache_dir=folder), boot_id)


def test_kv_files_are_new_each_time_and_gone_at_the_end(tmp_path: Path) -> None:
    ours = files(tmp_path)
    ours.open()
    made = [ours.new_kv_file(slot) for slot in (0, 0, 1)]
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
        "import os, signal; from pathlib import Path; from tests.dataplane.test_host_files import files;"
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
