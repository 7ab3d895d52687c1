"""Blobs in a folder on a disk that every process can access."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from controlplane.store.blobs.base import DRAFT, NAME, BlobStore, checked, gone


class FolderBlobs(BlobStore):
    """One file for each blob, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """Writes a draft in the same folder, renamed when it is complete."""
        target = self._path(file_id)
        draft = target.with_suffix(DRAFT)
        try:
            with draft.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            draft.rename(target)
            self._keep_names()
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _keep_names(self) -> None:
        """Flush the folder: a name outlives a power cut only then."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def open(self, file_id: str) -> IO[bytes]:
        try:
            return self._path(file_id).open("rb")
        except FileNotFoundError:
            raise gone(file_id) from None

    def delete(self, file_id: str) -> None:
        self._path(file_id).unlink(missing_ok=True)

    def older_than(self, age_s: float) -> set[str]:
        """By modification time. Other files in the folder are ignored, and those that disappear meanwhile."""
        before_s = time.time() - age_s
        found: set[str] = set()
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):
                if NAME.fullmatch(entry.name) and entry.stat().st_mtime < before_s:
                    found.add(entry.name)
        return found

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _path(self, file_id: str) -> Path:
        return self._folder / checked(file_id)
