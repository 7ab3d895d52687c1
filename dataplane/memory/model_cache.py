"""The node's model cache: one file per model in run-time layout, mapped by every slot (Aegaeon 5.2, "Model Cache").

The kernel's locks are the bookkeeping, so a process that dies leaves none behind:

    FOLDER/lock                 held (exclusive) while files are opened, renamed, removed: never while bytes move
    FOLDER/NAME.HASH-SIZE.model     complete; whoever maps it holds a shared lock, whoever evicts it an exclusive one
    FOLDER/NAME.HASH-SIZE.filling   incomplete; its filler holds an exclusive lock. Without that lock it is stale

Two limits hold: `capacity_bytes`, and what the file system has. Against either, files that nobody holds make way. A
mapping keeps its own descriptor, hence its lock, until the last tensor over it is gone.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import DataplaneError

_COMPLETE = ".model"
_FILLING = ".filling"
_WANTED = "room-wanted"
_WANTED_S = 1.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the one place where files are shared memory
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NAME_CHARACTERS_MAX = 64


class HostMemoryError(DataplaneError):
    """The node's host memory has no room for a model: `lack_bytes` lack, `held` are the models in the way, by name."""

    status = 503
    code = "host_memory_full"

    def __init__(self, message: str, *, lack_bytes: int = 0, held: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lack_bytes = lack_bytes
        self.held = held


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """A file of the cache. `held`: some process maps or fills it. `used_s` orders files by their last use."""

    name: str
    size_bytes: int
    used_s: float
    held: bool

    @property
    def model(self) -> str:
        """What is in it: the readable part of its key."""
        return self.name.partition(".")[0]


def choose_cache_evictions(
    files: Iterable[CachedFile], needed_bytes: int, capacity_bytes: int
) -> tuple[str, ...] | None:
    """Files to remove, least recently used first, so that `needed_bytes` more fit; None: held ones leave no room."""
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


def default_cache_folder(capacity_bytes: int, otherwise: Path) -> Path:
    """This user's folder in shared memory if it can grow to `capacity_bytes`, else the folder `otherwise`."""
    folder = _SHARED_MEMORY / f"tidepool-models-{os.getuid()}"
    if not os.path.ismount(_SHARED_MEMORY) or (folder.exists() and folder.stat().st_uid != os.getuid()):
        return otherwise
    return folder if room_bytes(_SHARED_MEMORY, folder) >= capacity_bytes else otherwise


def room_bytes(present: Path, folder: Path) -> int:
    """Bytes that `folder` could hold now: what it holds, and what is free in its file system, that of `present`."""
    held_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                held_bytes += (Path(path) / name).stat().st_blocks * 512
    return _free_bytes(present) + held_bytes


class CachedModel:
    """A complete model file, mapped. Nobody evicts it until it is released and no tensor lies over it any more."""

    def __init__(self, file: Path, mapping: mmap.mmap) -> None:
        self._file = file
        self._view: memoryview | None = memoryview(mapping)

    @property
    def view(self) -> memoryview:
        """All bytes of the file, the same memory for all slots of the node: to be read only.

        (The mapping is writable since CUDA pins, and torch wraps, no other kind without complaint.)
        """
        assert self._view is not None, "released"
        return self._view

    def release(self) -> None:
        """Give the file back. Twice does no harm."""
        if self._view is not None:
            self._view = None
            with suppress(FileNotFoundError):
                _touch(self._file)


class ModelCache:
    """Files of one folder, at most `capacity_bytes` together, shared by the processes and threads of a node."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes
        self._folder = folder

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those being filled included."""
        return sum(size_bytes for _, size_bytes, _ in self._list())

    def acquire(self, key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> CachedModel:
        """Map the file of `key`, a name for exactly these `size_bytes` bytes; `fill` writes them when nobody has yet.

        Blocks while another process or thread fills it. What `fill` raises is raised here, and nothing is kept.

        Raises:
            HostMemoryError: no room, even without the files that nobody holds.
            OSError: the file system fails in another way.
        """
        assert size_bytes > 0, f"{key} has no bytes"
        complete = self._folder / f"{_stem(key)}-{size_bytes}{_COMPLETE}"
        partial = complete.with_suffix(_FILLING)
        while True:
            with self._locked():
                if complete.exists():
                    return self._map_complete(complete)
                begin = not (partial.exists() and _held(partial))
                descriptor = self._begin(key, size_bytes, partial) if begin else os.open(partial, os.O_RDWR)
            if begin:
                return self._fill(key, descriptor, partial, complete, fill)
            with _closing(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_SH)

    def want_room(self) -> None:
        """Ask the other slots of the node to let go of files that they can spare."""
        (self._folder / _WANTED).write_text(str(os.getpid()))

    def room_is_wanted(self) -> bool:
        """Whether another slot asked for room a moment ago."""
        wanted = self._folder / _WANTED
        with suppress(OSError):
            return time.time() - wanted.stat().st_mtime < _WANTED_S and wanted.read_text() != str(os.getpid())
        return False

    def _map_complete(self, file: Path) -> CachedModel:
        descriptor = os.open(file, os.O_RDWR)
        with _closing(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _touch(file)
            return CachedModel(file, mmap.mmap(descriptor, 0))

    def _begin(self, key: str, size_bytes: int, partial: Path) -> int:
        """Make room, and a file of that size that this descriptor has locked."""
        partial.unlink(missing_ok=True)
        self._make_room(key, size_bytes)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, size_bytes)
        return descriptor

    def _fill(
        self, key: str, descriptor: int, partial: Path, complete: Path, fill: Callable[[memoryview], None]
    ) -> CachedModel:
        with _closing(descriptor):
            try:
                mapping = self._reserve(key, descriptor, partial.name)
                fill(memoryview(mapping))
                os.fsync(descriptor)
            except BaseException:
                with self._locked():
                    partial.unlink()
                raise
            with self._locked():
                partial.rename(complete)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                _touch(complete)
            return CachedModel(complete, mapping)

    def _reserve(self, key: str, descriptor: int, partial: str) -> mmap.mmap:
        """Map the file once it has all its pages: writing to a page that cannot be had would kill the process."""
        size_bytes = os.fstat(descriptor).st_size
        while not _allocated(descriptor, size_bytes):
            with self._locked():
                files = [file for file in self._files() if file.name != partial]
                spare = [file for file in files if not file.held]
                lack_bytes = size_bytes - os.fstat(descriptor).st_blocks * 512 - _free_bytes(self._folder)
                if not spare or lack_bytes > sum(file.size_bytes for file in spare):
                    raise _no_room(key, size_bytes, f"on the file system of {self._folder}", lack_bytes, files)
                (self._folder / min(spare, key=_last_use).name).unlink()
        return mmap.mmap(descriptor, size_bytes)

    def _make_room(self, key: str, size_bytes: int) -> None:
        self._remove_stale()
        files = self._files()
        evictions = choose_cache_evictions(files, size_bytes, self.capacity_bytes)
        if evictions is None:
            held_bytes = sum(file.size_bytes for file in files if file.held)
            where = f"in the model cache {self._folder} of {self.capacity_bytes} bytes"
            raise _no_room(key, size_bytes, where, held_bytes + size_bytes - self.capacity_bytes, files)
        for name in evictions:
            (self._folder / name).unlink()

    def _remove_stale(self) -> None:
        for file in self._folder.glob(f"*{_FILLING}"):
            if not _held(file):
                file.unlink()

    def _files(self) -> list[CachedFile]:
        return [
            CachedFile(name=file.name, size_bytes=size_bytes, used_s=used_s, held=_held(file))
            for file, size_bytes, used_s in self._list()
        ]

    def _list(self) -> Iterator[tuple[Path, int, float]]:
        """Files with size in bytes and time of last use; files that vanish meanwhile are left out."""
        for file in self._folder.iterdir():
            if file.suffix in {_COMPLETE, _FILLING}:
                with suppress(FileNotFoundError):
                    stat = file.stat()
                    yield file, stat.st_size, stat.st_mtime

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        with _closing(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


def _stem(key: str) -> str:
    """A file name without its size and kind: readable, without a dot, and then unlike that of any other key."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", key)[:_NAME_CHARACTERS_MAX]
    return f"{readable}.{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _last_use(file: CachedFile) -> tuple[float, str]:
    return file.used_s, file.name


def _no_room(key: str, size_bytes: int, where: str, lack_bytes: int, files: Iterable[CachedFile]) -> HostMemoryError:
    held = [file for file in files if file.held]
    named = ", ".join(f"{file.model} ({file.size_bytes} bytes)" for file in held) or "none"
    message = f"{key}: {size_bytes} bytes do not fit {where}: {lack_bytes} bytes lack; models in use: {named}"
    return HostMemoryError(message, lack_bytes=lack_bytes, held=tuple(file.model for file in held))


def _free_bytes(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


def _allocated(descriptor: int, size_bytes: int) -> bool:
    """Whether the file system had room for all pages of a file; they are the file's then."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return False
    return True


def _touch(file: Path) -> None:
    os.utime(file, ns=(time.time_ns(), time.time_ns()))


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDWR)
    with _closing(descriptor):
        return not _try_lock(descriptor, fcntl.LOCK_EX)


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
