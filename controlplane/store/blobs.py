"""Bytes of files, on a disk that every API and dispatcher process shares. A file appears whole or not at all."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from controlplane.errors import NotFoundError

CHUNK_BYTES = 1 << 20
_DRAFT = ".part"


class BlobStore:
    """One folder; a blob's name is its file id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """A stream to write a new blob to. It gets its name when the block ends well, and is dropped otherwise."""
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
        """The blob, to read.

        Raises:
            NotFoundError: its bytes are gone.
        """
        try:
            return self._path(file_id).open("rb")
        except FileNotFoundError:
            raise NotFoundError(f"the content of file '{file_id}' is gone", param="file_id") from None

    def chunks(self, stream: IO[bytes]) -> Iterator[bytes]:
        """The rest of an open blob in pieces of a mebibyte; closes it."""
        with stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk

    def delete(self, file_id: str) -> None:
        """Forget a blob; one that is gone already is no error."""
        self._path(file_id).unlink(missing_ok=True)

    def older_than(self, age_s: float) -> set[str]:
        """Names of blobs, half-written ones too, that were last written `age_s` seconds ago or earlier."""
        before_s = time.time() - age_s
        return {entry.name for entry in os.scandir(self._folder) if entry.stat().st_mtime < before_s}

    def free_bytes(self) -> int:
        """Room left on the disk."""
        return shutil.disk_usage(self._folder).free

    def _path(self, file_id: str) -> Path:
        assert file_id.removesuffix(_DRAFT).replace("-", "").isalnum(), "file ids are ours"
        return self._folder / file_id
