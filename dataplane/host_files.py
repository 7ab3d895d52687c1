"""The files of one agent in host memory: its slots' KV, and the model cache where no folder is given for one.

Each agent has a folder of its own and holds a lock in it, so that the next agent can remove what one that was killed
left behind.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

from dataplane.memory.model_cache import default_cache_folder
from dataplane.settings import AgentSettings

_LOCK = "lock"


class HostFiles:
    """Host memory as files. Nothing is made before `open`; `close` removes what is the agent's own."""

    def __init__(self, settings: AgentSettings, boot_id: str) -> None:
        self._settings = settings
        self._boot_id = boot_id
        self._files = 0
        self._lock: TextIO | None = None
        self._own = Path()

    @property
    def models(self) -> Path:
        """The folder of the model cache. A given one outlives the agent."""
        return (self._settings.cache_dir or self._own) / "models"

    def open(self) -> None:
        """Make the agent's folder, and remove those of dead agents beside it."""
        root = self._settings.cache_dir or default_cache_folder(_needed_bytes(self._settings), _temporary_folder())
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (root / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for folder in root.glob("agent-*"):
                _remove_unless_held(folder)
            self._own = root / f"agent-{self._boot_id}"
            self._own.mkdir(mode=0o700)
            self._lock = (self._own / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def new_kv_file(self, slot: int) -> Path:
        """Where the next worker of a slot makes its host KV; never the same twice."""
        self._files += 1
        return self._own / f"kv-{slot}-{self._files}"

    def close(self) -> None:
        """Remove the agent's folder."""
        if self._lock is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _needed_bytes(settings: AgentSettings) -> int:
    return settings.cache_bytes + sum(settings.host_kv_bytes_of(slot) for slot in settings.slots)


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"tidepool-{os.getuid()}"


def _remove_unless_held(folder: Path) -> None:
    with (folder / _LOCK).open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
