"""Blobs in two stores, such as buckets of two regions, so that the loss of one loses no file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

import structlog

from controlplane.errors import NotFoundError, UnavailableError
from controlplane.store.blobs.base import BlobStore

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = structlog.get_logger()
_RETRY_AFTER_S = 5
_AWAY = (UnavailableError, OSError)


class MirroredBlobs(BlobStore):
    """`near` is read first. `at_once`: a blob is stored when both have it; else when the near one has it, and
    `copy_missing` makes the copy later.
    """

    def __init__(self, near: BlobStore, far: BlobStore, *, at_once: bool) -> None:
        self._near, self._far = near, far
        self._at_once = at_once

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """The far store has it first: where the near one then fails, what is there is no blob that anybody knows."""
        if not self._at_once:
            with self._near.writing(file_id) as stream:
                yield stream
            return
        try:
            with self._near.writing(file_id) as near, self._far.writing(file_id) as far:
                yield cast("IO[bytes]", _Tee(near, far))
        except BaseException as error:
            self._delete(self._far, file_id)
            if isinstance(error, OSError):
                raise UnavailableError("a store for files does not answer", retry_after_s=_RETRY_AFTER_S) from error
            raise

    def open(self, file_id: str) -> IO[bytes]:
        """From the near store, or the far one where that has it not or does not answer.

        Raises:
            NotFoundError: both say that it is gone.
            UnavailableError: neither has shown it, and one of them does not answer.
        """
        try:
            return self._near.open(file_id)
        except NotFoundError:
            return self._far.open(file_id)
        except _AWAY as away:
            try:
                return self._far.open(file_id)
            except NotFoundError:
                raise away from None

    def delete(self, file_id: str) -> None:
        """From both. What a store that does not answer keeps is deleted later, as what nobody knows."""
        for store in (self._near, self._far):
            self._delete(store, file_id)

    def older_than(self, age_s: float) -> set[str]:
        return self._near.older_than(age_s) | self._far.older_than(age_s)

    def free_bytes(self) -> int:
        return min(self._near.free_bytes(), self._far.free_bytes())

    def lacking_a_copy(self, age_s: float) -> set[str]:
        """Names of blobs of that age that only one of the stores has, complete or not."""
        return self._near.older_than(age_s) ^ self._far.older_than(age_s)

    def copy_missing(self, file_id: str) -> bool:
        """Copy a blob to the store that lacks it; False: neither has it, or both do."""
        stores = (self._near, self._far)
        there = [_has(store, file_id) for store in stores]
        if there[0] == there[1]:
            return False
        source, target = stores if there[0] else stores[::-1]
        with target.writing(file_id) as copy:
            for chunk in source.chunks(source.open(file_id)):
                copy.write(chunk)
        return True

    @staticmethod
    def _delete(store: BlobStore, file_id: str) -> None:
        try:
            store.delete(file_id)
        except _AWAY as error:
            log.warning("a file is left in a store that does not answer", file_id=file_id, error=str(error))


class _Tee:
    """A stream for bytes that goes to two others."""

    def __init__(self, *streams: IO[bytes]) -> None:
        self._streams = streams

    def write(self, data: "ReadableBuffer", /) -> int:
        return max(stream.write(data) for stream in self._streams)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def _has(store: BlobStore, file_id: str) -> bool:
    try:
        store.open(file_id).close()
    except NotFoundError:
        return False
    return True
