"""Bytes of files, shared by every API and dispatcher process. A file appears whole or not at all."""

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from controlplane.errors import InvalidValueError, NotFoundError
from controlplane.settings import Settings

CHUNK_BYTES = 1 << 20
_DRAFT = ".part"
_NAME = re.compile(rf"[A-Za-z0-9-]+({re.escape(_DRAFT)})?")


class BlobStore(ABC):
    """Where blobs lie; a blob's name is its file id. Every call may raise UnavailableError (where they lie in a bucket)
    or OSError (on a disk).
    """

    @abstractmethod
    def writing(self, file_id: str) -> AbstractContextManager[IO[bytes]]:
        """A stream to write a new blob to. It gets its name when the block ends well, and is dropped otherwise."""

    @abstractmethod
    def open(self, file_id: str) -> IO[bytes]:
        """The blob, to read. What is read may come in pieces from afar.

        Raises:
            NotFoundError: its bytes are gone.
        """

    @abstractmethod
    def delete(self, file_id: str) -> None:
        """Forget a blob; one that is gone already is no error."""

    @abstractmethod
    def older_than(self, age_s: float) -> set[str]:
        """Names of blobs, half-written ones too, that were last written `age_s` seconds ago or earlier."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Room left on the disk, for blobs or for drafts of them."""

    def chunks(self, stream: IO[bytes]) -> Iterator[bytes]:
        """The rest of an open blob in pieces of a mebibyte; closes it."""
        with stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk


class FolderBlobs(BlobStore):
    """One folder, on a disk that all of them reach."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """A draft beside the others, renamed when it is whole."""
        target = self._path(file_id)
        draft = target.with_suffix(_DRAFT)
        try:
            with draft.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            draft.rename(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def open(self, file_id: str) -> IO[bytes]:
        """The file itself."""
        try:
            return self._path(file_id).open("rb")
        except FileNotFoundError:
            raise gone(file_id) from None

    def delete(self, file_id: str) -> None:
        """Unlink it."""
        self._path(file_id).unlink(missing_ok=True)

    def older_than(self, age_s: float) -> set[str]:
        """By the time of modification. What else lies in the folder is none of ours."""
        before_s = time.time() - age_s
        found = (entry for entry in os.scandir(self._folder) if _NAME.fullmatch(entry.name))
        return {entry.name for entry in found if entry.stat().st_mtime < before_s}

    def free_bytes(self) -> int:
        """Of the folder's disk."""
        return shutil.disk_usage(self._folder).free

    def _path(self, file_id: str) -> Path:
        return self._folder / checked(file_id)


def open_blobs(settings: Settings) -> BlobStore:
    """The folder `files` in our home, or the bucket of `files_url`.

    Raises:
        InvalidValueError: `files_url` is set, but the extra `s3` is not installed.
    """
    if settings.files_url is None:
        return FolderBlobs(settings.with_home() / "files")
    try:
        from controlplane.store.bucket import BucketBlobs  # noqa: PLC0415 - an extra
    except ImportError as error:
        message = "files_url is set, which needs the extra: pip install tidepool[s3]"
        raise InvalidValueError(message, param="files_url") from error
    return BucketBlobs(settings.files_url, drafts=settings.with_home() / "drafts")


def checked(name: str) -> str:
    """A blob's name that leads nowhere else: letters, digits and dashes.

    Raises:
        InvalidValueError: it is another one, such as a path.
    """
    if not _NAME.fullmatch(name):
        raise InvalidValueError(f"a file id is letters, digits and dashes: {name[:100]!r}", param="file_id")
    return name


def gone(file_id: str) -> NotFoundError:
    """There are no bytes of that name."""
    return NotFoundError(f"the content of file '{file_id}' is gone", param="file_id")
