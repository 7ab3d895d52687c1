"""What every store of blobs promises. A blob appears whole or not at all."""

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


def checked(name: str) -> str:
    """A blob's name that leads nowhere else: letters, digits and dashes.

    Raises:
        InvalidValueError: it is another one, such as a path.
    """
    if not NAME.fullmatch(name):
        raise InvalidValueError(f"a file id is letters, digits and dashes: {name[:100]!r}", param="file_id")
    return name


def gone(file_id: str) -> NotFoundError:
    """There are no bytes of that name."""
    return NotFoundError(f"the content of file '{file_id}' is gone", param="file_id")
