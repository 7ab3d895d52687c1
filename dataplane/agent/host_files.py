"""The files of one agent in host memory: its workers' KV, and the model cache where no folder is set for it.

Each agent has a folder and holds a lock in it, so that the next agent can remove the folders of killed agents.

Where the file system holds less than `cache_bytes`, the agent makes the model cache smaller and logs a warning, instead
of refusing to start: the models that fit are served, and a load that does not fit fails with an error that names the
limit.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from dataplane.agent.settings import AgentSettings
from dataplane.memory.model_cache import HostMemoryError, available_bytes, default_cache_folder
from dataplane.runtime.private_folder import NotPrivateError, PrivateFolder

log = structlog.get_logger()

_LOCK, _AGENT = "lock", "agent-"
_MADE = os.O_RDWR | os.O_CREAT


class HostFiles:
    """Host memory as files. `open` makes the agent's folder, `close` removes it.

    `cache_bytes`: the limit for models, by the settings and, once open, by the free space of the file system.
    `available`: the bytes available to models, from the file system and the folder of the model cache.
    """

    def __init__(
        self, settings: AgentSettings, boot_id: str, *, available: Callable[[Path, Path], int] = available_bytes
    ) -> None:
        self.cache_bytes = settings.cache_bytes
        self._settings = settings
        self._boot_id = boot_id
        self._available = available
        self._files = 0
        self._root: PrivateFolder | None = None
        self._lock: int | None = None
        self._own = Path()

    @property
    def models(self) -> Path:
        """The folder of the model cache. One that the settings name outlives the agent."""
        return (self._settings.cache_dir or self._own) / "models"

    def open(self) -> None:
        """Make the agent's folder, and remove those of dead agents.

        Raises:
            HostMemoryError: the file system has no space for models in addition to the KV of the prefill workers.
            NotPrivateError: the folder that the settings name, or something of the same name in it, is not ours alone.
        """
        given = self._settings.cache_dir
        root = (
            default_cache_folder(_needed_bytes(self._settings))
            if given is None
            else PrivateFolder(given, readable=True)
        )
        with root.opened(_LOCK, _MADE) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in root.names():
                if name.startswith(_AGENT):
                    _remove_unless_held(root, name)
            self._own = root.path / f"{_AGENT}{self._boot_id}"
            self.cache_bytes = self._fitting_cache_bytes(root.path)
            self._root, self._lock = root, root.inner(self._own.name).open(_LOCK, _MADE)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def new_kv_file(self, worker: int) -> Path:
        """The file for the host KV of a worker's next process; a new one each time."""
        self._files += 1
        return self._own / f"kv-{worker}-{self._files}"

    def close(self) -> None:
        if self._root is not None and self._lock is not None:
            self._root.remove_tree(self._own.name)
            os.close(self._lock)
            self._root = self._lock = None

    def _fitting_cache_bytes(self, root: Path) -> int:
        wanted_bytes = self._settings.cache_bytes
        kv_bytes = _shared_kv_bytes(self._settings)
        free_bytes = self._available(root, self.models) - kv_bytes
        if free_bytes < 1:
            raise HostMemoryError(
                f"{root} has no space for models: {free_bytes + kv_bytes} bytes are free, and host_kv_bytes of the"
                f" prefill workers take {kv_bytes}"
            )
        if free_bytes < wanted_bytes:
            log.warning("model cache made smaller", folder=str(root), cache_bytes=wanted_bytes, free_bytes=free_bytes)
        return min(wanted_bytes, free_bytes)


def _shared_kv_bytes(settings: AgentSettings) -> int:
    """Bytes of the KV files, which only prefill workers have."""
    kinds = zip(settings.slots, settings.kinds, strict=True)
    return sum(settings.host_kv_bytes_of(worker) for worker, kind in kinds if kind == "prefill")


def _needed_bytes(settings: AgentSettings) -> int:
    return settings.cache_bytes + sum(settings.host_kv_bytes_of(worker) for worker in settings.slots)


def _remove_unless_held(root: PrivateFolder, name: str) -> None:
    try:
        lock = root.inner(name).open(_LOCK, _MADE)
    except (NotPrivateError, OSError) as error:
        log.warning("folder is not removed", reason=str(error))
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        root.remove_tree(name)
    except BlockingIOError:
        return  # its agent lives
    finally:
        os.close(lock)
