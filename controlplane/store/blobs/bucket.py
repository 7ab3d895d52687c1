"""Bytes of files in a bucket of any S3-compatible server, for installations without a shared disk (extra `s3`).

Credentials, region and endpoint come from the usual AWS_* variables, or from the machine's role.
"""

import io
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import S3Store

from controlplane.errors import UnavailableError
from controlplane.store.blobs.base import BlobStore, checked, gone

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore.store import S3Config

log = structlog.get_logger()
PART_BYTES = 8 << 20
"""The size of one request's part; two are uploaded concurrently."""
_OURS = re.compile(r"file-[0-9a-f]{32}")
_RETRY_AFTER_S = 5


class BucketBlobs(BlobStore):
    """`url`: s3://BUCKET[/PREFIX]. A draft in the folder `drafts` is uploaded when it is complete, so refused files
    never reach the bucket; an interrupted upload is a multipart upload, for which buckets have a lifecycle rule.
    `endpoint`, `region`: in place of the AWS_* variables'.
    """

    def __init__(self, url: str, *, drafts: Path, endpoint: str | None = None, region: str | None = None) -> None:
        self._drafts = drafts
        drafts.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._store = S3Store.from_url(
            url,
            config=_config(endpoint, region),
            client_options={"allow_http": True, "connect_timeout": "5s", "timeout": "30s"},  # http if the endpoint is
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=15)},
        )

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """Writes an unnamed draft, then uploads it, in parts if it is large."""
        name = checked(file_id)
        with TemporaryFile(dir=self._drafts) as draft:
            yield draft
            draft.seek(0)
            with _translated():
                obstore.put(self._store, name, draft, chunk_size=PART_BYTES, max_concurrency=2)

    def open(self, file_id: str) -> IO[bytes]:
        """A stream that downloads parts as they are read."""
        with _translated():
            size = self._size(checked(file_id))
        if size is None:
            raise gone(file_id)
        return io.BufferedReader(_Ranges(self._store, file_id, size), PART_BYTES)

    def delete(self, file_id: str) -> None:
        with _translated():
            obstore.delete(self._store, checked(file_id))

    def older_than(self, age_s: float) -> set[str]:
        """By the server's time of the upload. Other objects in the bucket are ignored."""
        before = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=age_s)
        with _translated():
            return {
                entry["path"]
                for page in obstore.list(self._store)
                for entry in page
                if entry["last_modified"] < before and _OURS.fullmatch(entry["path"])
            }

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._drafts).free

    def _size(self, name: str) -> int | None:
        """In bytes; None: there is no such object."""
        try:
            return obstore.head(self._store, name)["size"]
        except FileNotFoundError:
            next(obstore.list(self._store, name), None)  # fails if it is the bucket that is not there
            return None


def _config(endpoint: str | None, region: str | None) -> "S3Config":
    config: S3Config = {"disable_bulk_delete": True}  # some servers do not support it
    if endpoint is not None:
        config["endpoint"] = endpoint
    if region is not None:
        config["region"] = region
    return config


class _Ranges(io.RawIOBase):
    """An object of `size` bytes, read by ranges: no connection is open between reads."""

    def __init__(self, store: S3Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = min(self._size, max(0, start + offset))
        return self._at

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), self._size - self._at)
        if count:
            with _translated():
                view[:count] = memoryview(obstore.get_range(self._store, self._name, start=self._at, length=count))
        self._at += count
        return count

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(PART_BYTES) or b"", b""))


@contextmanager
def _translated() -> Iterator[None]:
    """Raises the server's errors as UnavailableError. Their text may contain its address: only the log has it."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        log.warning("the bucket for files refuses, or does not answer", error=str(error).partition("\n\n")[0])
        raise UnavailableError("the store for files does not answer", retry_after_s=_RETRY_AFTER_S) from error
