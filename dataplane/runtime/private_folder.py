"""Folders that only this user can write to, in parents that all users can write to, and the files in them.

Names under /dev/shm and /tmp can be guessed, so another user may have created one first, with symbolic links in it to
our files. A folder is therefore opened once, must be a directory that this user owns and no other may change, and its
files are opened relative to its descriptor without following links. If another user owns the name, a folder with a
random suffix is created, which later processes find again.
"""

import errno
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from dataplane.protocol.errors import DataplaneError

log = structlog.get_logger()
_NOT_OURS = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENXIO})
"""What the system says of names that are links, other users' or no plain files; the rest is about the file system."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotPrivateError(DataplaneError):
    """A folder or file that other users own or may change. The message names it and its owner."""

    code = "not_private"


class PrivateFolder:
    """An open folder of this user, created if it is missing. `readable`: other users may read it, but not write."""

    def __init__(self, path: Path, *, readable: bool = False, within: "PrivateFolder | None" = None) -> None:
        """Create and open it; with `within`, relative to the descriptor of that folder.

        Raises:
            NotPrivateError: it is a link, no directory, another user's, or open to others.
            OSError: the file system fails in another way.
        """
        at: dict[str, Any] = {"path": path} if within is None else {"path": path.name, "dir_fd": within.descriptor}
        if within is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(mode=0o700, **at)
        try:
            self.descriptor: int = os.open(flags=_DIRECTORY, **at)
        except OSError as error:
            raise _refused(path, error) from error
        weakref.finalize(self, os.close, self.descriptor)
        self.path = path
        _check_folder(path, os.fstat(self.descriptor), 0o022 if readable else 0o077)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file in it; `O_CREAT` creates it with mode 0600.

        Raises:
            NotPrivateError: it is a link, no regular file, another user's, or has a second hard link.
            OSError: it is or is not there, as `os.open` says, or the file system fails in another way.
        """
        path = self.path / name
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            raise _refused(path, error) from error
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
            return descriptor
        os.close(descriptor)
        raise NotPrivateError(
            f"{path} cannot be used: it is no plain file of uid {os.geteuid()} with one name"
            f" (owner {found.st_uid}, links {found.st_nlink})"
        )

    @contextmanager
    def opened(self, name: str, flags: int) -> Iterator[int]:
        """`open`, with the descriptor closed at the end of the block."""
        descriptor = self.open(name, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def inner(self, name: str) -> "PrivateFolder":
        """A folder in it with the same guarantees, created if it is missing."""
        return PrivateFolder(self.path / name, within=self)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Links are not followed."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.descriptor)

    def rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a folder in it with its content; errors are ignored, links are not followed."""
        shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)


def find_folder(parent: Path, name: str) -> PrivateFolder | None:
    """This user's folder of that name in a parent that all can write to, or its replacement; None if neither exists."""
    for path in (parent / name, *sorted(parent.glob(f"{name}-*"))):
        if path.is_dir():
            with suppress(NotPrivateError):
                return PrivateFolder(path)
    return None


def make_folder(parent: Path, name: str) -> PrivateFolder:
    """Create a folder of that name in a parent that all can write to; with a suffix if another user owns the name."""
    try:
        return PrivateFolder(parent / name)
    except NotPrivateError as error:
        other = tempfile.mkdtemp(prefix=f"{name}-", dir=parent)
        log.warning("another folder is used", folder=other, reason=error.message)
        return PrivateFolder(Path(other))


def _check_folder(path: Path, found: os.stat_result, forbidden: int) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        fault = f"it belongs to uid {found.st_uid}, and this is uid {os.geteuid()}"
    elif mode & forbidden:
        fault = f"its mode is {mode:04o}, which lets others in; chmod 700 it"
    else:
        return
    raise NotPrivateError(f"{path} cannot be used: {fault}, or name another folder (TIDEPOOL_AGENT_CACHE_DIR)")


def _refused(path: Path, error: OSError) -> OSError | NotPrivateError:
    """The error of a name that cannot be opened, such as that it is not ours, or that the disk is full."""
    if error.errno in _NOT_OURS:
        return NotPrivateError(f"{path} cannot be used: {_kind(path)} ({error.strerror})")
    return OSError(error.errno, error.strerror, str(path))


def _kind(path: Path) -> str:
    return "it is a symbolic link" if path.is_symlink() else "it is no directory or file of ours"
