"""The folder of a model's checkpoint on this node: its path, or the folder that a remote one is downloaded into."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import TypeVar

import structlog

from dataplane.checkpoints.fetch import fetch_checkpoint, no_progress
from dataplane.checkpoints.sources import PUBLIC, FetchError, FetchRules, Progress
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.model_sources import check_source, is_remote

log = structlog.get_logger()

PROGRESS_EVERY_S = 5.0
NAME_CHARACTERS_MAX = 80
"""Of the source, in the name of its folder."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Allowed sources. `folder`: parent of the folders of downloads, which obey `rules`; `roots`: folders of this node
    that may contain a model's path, None for all.
    """

    folder: Path
    rules: FetchRules = PUBLIC
    roots: tuple[Path, ...] | None = None

    def check_root(self, path: str) -> None:
        """Raise ModelLoadError for a path that is in none of the roots after its links are resolved."""
        if self.roots is None:
            return
        real = Path(path).resolve()
        if not any(real.is_relative_to(root.expanduser().resolve()) for root in self.roots):
            raise ModelLoadError(f"{path} is in none of this node's checkpoint_roots")


def local_checkpoint(path: str, sources: Sources, progress: Progress = no_progress, *, weights: bool = True) -> Path:
    """The folder of a checkpoint. A remote one is downloaded first, with or without its weights. Blocks.

    Raises:
        ModelLoadError: the checkpoint cannot be fetched, or is not allowed.
    """
    try:
        check_source(path)
    except ValueError as error:
        raise ModelLoadError(f"{path!r} is no source of a model: {error}") from error
    if not is_remote(path):
        sources.check_root(path)
        return Path(path)
    folder = sources.folder.expanduser() / _folder_name(path)
    try:
        return fetch_checkpoint(path, folder, weights=weights, progress=progress, rules=sources.rules)
    except ModelLoadError:
        raise
    except Exception as error:  # the hub's client has no common exception
        raise FetchError(f"{path} cannot be fetched: {error!r}") from error


def read_ahead(folder: Path) -> None:
    """Advise the kernel to read a checkpoint's weights into the page cache while the worker process starts. Errors are
    ignored here, since the load reports them.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


class ProgressLog:
    """A progress callback of a fetch that logs every few seconds and raises once the checkpoint is not wanted any more.
    `done_bytes` and `total_bytes` are the last reported values.
    """

    def __init__(self, path: str, is_wanted: Callable[[], bool], now_s: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._is_wanted = is_wanted
        self._now_s = now_s
        self._logged_s = now_s()
        self.done_bytes = self.total_bytes = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Raises FetchError if the checkpoint is not wanted any more; the next fetch resumes the download."""
        if not self._is_wanted():
            raise FetchError(f"{self._path} is not wanted any longer")
        self.done_bytes, self.total_bytes = done_bytes, total_bytes
        now_s = self._now_s()
        if now_s - self._logged_s >= PROGRESS_EVERY_S:
            self._logged_s = now_s
            log.info("fetching checkpoint", path=self._path, done_bytes=done_bytes, total_bytes=total_bytes)


async def in_own_thread(call: Callable[[], Result]) -> Result:
    """`asyncio.to_thread` for calls of minutes, in a daemon thread: requests keep their threads, and the process can
    exit."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, name="fetch", daemon=True).start()
    return await asyncio.wrap_future(future)


def _folder_name(source: str) -> str:
    """A source as a file name: a readable part and a hash."""
    source = source.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", source.partition("://")[2])[-NAME_CHARACTERS_MAX:]
    return f"{readable}-{sha256(source.encode()).hexdigest()[:12]}"
