"""The node's model cache: one file per model in run-time layout, mapped by every worker (Aegaeon 5.2, "Model Cache").

The state is in kernel file locks, which are released when a process dies:

    FOLDER/lock                     exclusive while files are opened, renamed, removed: not while bytes are copied
    FOLDER/NAME.HASH-SIZE.model     complete; mapped under a shared lock, evicted under an exclusive one
    FOLDER/NAME.HASH-SIZE.filling   incomplete; filled under an exclusive lock, and stale if there is none

There are two limits: `capacity_bytes`, and the free space of the file system. At either, files that no process holds
are evicted. A mapping keeps its own descriptor, hence its lock, until the last tensor over it is freed.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dataplane.protocol.errors import DataplaneError
from dataplane.runtime.private_folder import NotPrivateError, PrivateFolder, find_folder, make_folder

_COMPLETE = ".model"
_FILLING = ".filling"
_REQUEST = "room-wanted"
_REQUEST_S = 1.0
_REQUEST_BYTES = 32
"""Written over those of the former request, so that a request for space needs none."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the one place where files are shared memory
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NAME_CHARACTERS_MAX = 64


class HostMemoryError(DataplaneError):
    """The node's host memory cannot hold a model: `lack_bytes` are missing, `held` are the models in use, by name."""

    status = 503
    code = "host_memory_full"

    def __init__(self, message: str, *, lack_bytes: int = 0, held: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lack_bytes = lack_bytes
        self.held = held


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """A file of the cache. `held`: some process maps or fills it. `used_s`: Unix time of the last use."""

    name: str
    size_bytes: int
    used_s: float
    held: bool

    @property
    def model(self) -> str:
        """The readable part of its key."""
        return self.name.partition(".")[0]


def choose_cache_evictions(
    files: Iterable[CachedFile], needed_bytes: int, capacity_bytes: int
) -> tuple[str, ...] | None:
    """Files to evict, least recently used first, for `needed_bytes` more bytes; None if the held ones are too large."""
    files = tuple(files)
    excess_bytes = sum(file.size_bytes for file in files) + needed_bytes - capacity_bytes
    chosen = []
    for file in sorted(files, key=_last_use):
        if excess_bytes <= 0:
            break
        if not file.held:
            chosen.append(file.name)
            excess_bytes -= file.size_bytes
    return tuple(chosen) if excess_bytes <= 0 else None


def default_cache_folder(capacity_bytes: int) -> PrivateFolder:
    """This user's folder in shared memory if it can grow to `capacity_bytes`, else the one for temporary files."""
    if os.path.ismount(_SHARED_MEMORY):
        name = f"tidepool-models-{os.geteuid()}"
        ours = find_folder(_SHARED_MEMORY, name)
        if available_bytes(_SHARED_MEMORY, None if ours is None else ours.path) >= capacity_bytes:
            return ours or make_folder(_SHARED_MEMORY, name)
    parent, name = Path(tempfile.gettempdir()), f"tidepool-{os.geteuid()}"
    return find_folder(parent, name) or make_folder(parent, name)


def available_bytes(present: Path, folder: Path | None) -> int:
    """Bytes that `folder` can hold: what it holds, and what is free in its file system, which is that of `present`."""
    held_bytes = 0
    for path, _, names in () if folder is None else os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                held_bytes += (Path(path) / name).lstat().st_blocks * 512
    return _free_bytes(present) + held_bytes


class CachedModel:
    """A complete model file, mapped. It is not evicted until it is released and no tensor uses the mapping."""

    def __init__(self, folder: PrivateFolder, file: str, mapping: mmap.mmap) -> None:
        self._folder = folder
        self._file = file
        self._view: memoryview | None = memoryview(mapping)

    @property
    def path(self) -> Path:
        """The file, which stays where it is until it is evicted."""
        return self._folder.path / self._file

    @property
    def view(self) -> memoryview:
        """All bytes of the file, in memory that all workers of the node share. Callers must not write.

        (The mapping is writable, since CUDA cannot pin a read-only one and torch warns about it.)
        """
        assert self._view is not None, "released"
        return self._view

    def release(self) -> None:
        """Let the file be evicted. May be called twice."""
        if self._view is not None:
            self._view = None
            with suppress(FileNotFoundError), self._folder.opened(self._file, os.O_RDWR) as descriptor:
                _touch(descriptor)


class ModelCache:
    """Files of one folder, at most `capacity_bytes` together, shared by the processes and threads of a node."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        """Open the folder, and create it if it is missing. Raises NotPrivateError if other users can write to it."""
        self.capacity_bytes = capacity_bytes
        self._folder = PrivateFolder(folder)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, incomplete ones included."""
        return sum(size_bytes for _, size_bytes, _ in self._list())

    def acquire(self, key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> CachedModel:
        """Map the file of `key`, a name for exactly these `size_bytes` bytes; `fill` writes them if it does not exist.

        Blocks while another process or thread fills it. Exceptions of `fill` pass through, and its file is removed.

        Raises:
            HostMemoryError: it does not fit, even without the files that no process holds.
            OSError: the file system fails in another way.
        """
        assert size_bytes > 0, f"{key} has no bytes"
        stem = f"{_stem(key)}-{size_bytes}"
        complete, partial = f"{stem}{_COMPLETE}", f"{stem}{_FILLING}"
        while True:
            with self._locked():
                if self._folder.has(complete):
                    return self._map_complete(complete)
                begin = not (self._folder.has(partial) and self._held(partial))
                descriptor = self._begin(key, size_bytes, partial) if begin else self._folder.open(partial, os.O_RDWR)
            if begin:
                return self._fill(key, descriptor, partial, complete, fill)
            with os.fdopen(descriptor, "r+b"):
                fcntl.flock(descriptor, fcntl.LOCK_SH)

    def request_space(self) -> None:
        """Ask the other workers of the node to release files that they do not need. On a full file system this worker
        may count as one of them.
        """
        with suppress(OSError, NotPrivateError), self._folder.opened(_REQUEST, os.O_RDWR | os.O_CREAT) as descriptor:
            _touch(descriptor)
            os.write(descriptor, f"{os.getpid():<{_REQUEST_BYTES}}".encode())

    def space_is_requested(self) -> bool:
        """Whether another worker requested space within the last second."""
        with suppress(OSError), self._folder.opened(_REQUEST, os.O_RDONLY) as descriptor:
            recent = time.time() - os.fstat(descriptor).st_mtime < _REQUEST_S
            return recent and os.read(descriptor, _REQUEST_BYTES).strip() != str(os.getpid()).encode()
        return False

    def _map_complete(self, file: str) -> CachedModel:
        with self._folder.opened(file, os.O_RDWR) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _touch(descriptor)
            return CachedModel(self._folder, file, mmap.mmap(descriptor, 0))

    def _begin(self, key: str, size_bytes: int, partial: str) -> int:
        """Evict files, and create one of that size, which the returned descriptor locks."""
        with suppress(FileNotFoundError):
            self._folder.remove(partial)
        self._make_space(key, size_bytes)
        descriptor = self._folder.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, size_bytes)
        return descriptor

    def _fill(
        self, key: str, descriptor: int, partial: str, complete: str, fill: Callable[[memoryview], None]
    ) -> CachedModel:
        with os.fdopen(descriptor, "r+b"):
            try:
                mapping = self._reserve(key, descriptor, partial)
                fill(memoryview(mapping))
                os.fsync(descriptor)
            except BaseException:
                with self._locked():
                    self._folder.remove(partial)
                raise
            with self._locked():
                self._folder.rename(partial, complete)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                _touch(descriptor)
            return CachedModel(self._folder, complete, mapping)

    def _reserve(self, key: str, descriptor: int, partial: str) -> mmap.mmap:
        """Map the file after all its pages are allocated: writing to a page that cannot be would kill the process."""
        size_bytes = os.fstat(descriptor).st_size
        while not _allocated(descriptor, size_bytes):
            with self._locked():
                files = [file for file in self._files() if file.name != partial]
                spare = [file for file in files if not file.held]
                lack_bytes = size_bytes - os.fstat(descriptor).st_blocks * 512 - _free_bytes(self._folder.path)
                if not spare or lack_bytes > sum(file.size_bytes for file in spare):
                    raise _too_large(key, size_bytes, f"on the file system of {self._folder.path}", lack_bytes, files)
                self._folder.remove(min(spare, key=_last_use).name)
        return mmap.mmap(descriptor, size_bytes)

    def _make_space(self, key: str, size_bytes: int) -> None:
        self._remove_stale()
        files = self._files()
        evictions = choose_cache_evictions(files, size_bytes, self.capacity_bytes)
        if evictions is None:
            held_bytes = sum(file.size_bytes for file in files if file.held)
            where = f"in the model cache {self._folder.path} of {self.capacity_bytes} bytes"
            raise _too_large(key, size_bytes, where, held_bytes + size_bytes - self.capacity_bytes, files)
        for name in evictions:
            self._folder.remove(name)

    def _remove_stale(self) -> None:
        for name in self._folder.names():
            if name.endswith(_FILLING) and not self._held(name):
                self._folder.remove(name)

    def _files(self) -> list[CachedFile]:
        return [
            CachedFile(name=name, size_bytes=size_bytes, used_s=used_s, held=self._held(name))
            for name, size_bytes, used_s in self._list()
        ]

    def _list(self) -> Iterator[tuple[str, int, float]]:
        """Name, size in bytes and Unix time of last use; files that are removed meanwhile are left out."""
        for name in self._folder.names():
            if name.endswith((_COMPLETE, _FILLING)):
                with suppress(FileNotFoundError):
                    stat = self._folder.stat(name)
                    yield name, stat.st_size, stat.st_mtime

    def _held(self, name: str) -> bool:
        with self._folder.opened(name, os.O_RDWR) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._folder.opened("lock", os.O_RDWR | os.O_CREAT) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


def _stem(key: str) -> str:
    """A file name without size and suffix: a readable part without a dot, and a hash of the key."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", key)[:_NAME_CHARACTERS_MAX]
    return f"{readable}.{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _last_use(file: CachedFile) -> tuple[float, str]:
    return file.used_s, file.name


def _too_large(key: str, size_bytes: int, where: str, lack_bytes: int, files: Iterable[CachedFile]) -> HostMemoryError:
    held = [file for file in files if file.held]
    named = ", ".join(f"{file.model} ({file.size_bytes} bytes)" for file in held) or "none"
    message = f"{key}: {size_bytes} bytes do not fit {where}: {lack_bytes} bytes lack; models in use: {named}"
    return HostMemoryError(message, lack_bytes=lack_bytes, held=tuple(file.model for file in held))


def _free_bytes(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


def _allocated(descriptor: int, size_bytes: int) -> bool:
    """Allocate all pages of a file; False if the file system is full."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return False
    return True


def _touch(descriptor: int) -> None:
    os.utime(descriptor, ns=(time.time_ns(), time.time_ns()))
