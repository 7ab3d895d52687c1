"""The interface of blob stores. A blob is visible only when it is complete."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO

from controlplane.errors import InvalidValueError, NotFoundError

CHUNK_BYTES = 1 << 20
DRAFT = ".part"
NAME = re.compile(rf"[A-Za-z0-9-]+({re.escape(DRAFT)})?")


class BlobStore(ABC):
    """A store of blobs; a blob's name is its file id. Every call may raise UnavailableError (a bucket) or OSError (a
    disk).
    """

    @abstractmethod
    def writing(self, file_id: str) -> AbstractContextManager[IO[bytes]]:
        """A stream to write a new blob to. It is stored when the block succeeds, and deleted otherwise."""

    @abstractmethod
    def open(self, file_id: str) -> IO[bytes]:
        """The blob, to read.

        Raises:
            NotFoundError: it is deleted.
        """

    @abstractmethod
    def delete(self, file_id: str) -> None:
        """Delete a blob, if it exists."""

    @abstractmethod
    def older_than(self, age_s: float) -> set[str]:
        """Names of blobs, also incomplete ones, that were last written at least `age_s` seconds ago."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Free bytes of the disk for blobs, or for drafts of them."""

    def chunks(self, stream: IO[bytes]) -> Iterator[bytes]:
        """The rest of an open blob in pieces of a mebibyte; closes it."""
        with stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk


def checked(name: str) -> str:
    """The name, if it is made of letters, digits and dashes.

    Raises:
        InvalidValueError: it is not, such as a path.
    """
    if not NAME.fullmatch(name):
        raise InvalidValueError(f"a file id is letters, digits and dashes: {name[:100]!r}", param="file_id")
    return name


def gone(file_id: str) -> NotFoundError:
    """The error for a blob that does not exist."""
    return NotFoundError(f"the content of file '{file_id}' is gone", param="file_id")
