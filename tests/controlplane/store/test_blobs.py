"""A blob is there whole or not at all."""

from pathlib import Path

import pytest

from controlplane.errors import NotFoundError
from controlplane.store.blobs import BlobStore


def test_a_half_written_blob_is_never_seen(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "files")
    with blobs.writing("file-1") as stream:
        stream.write(b"half")
        stream.flush()
        with pytest.raises(NotFoundError):
            blobs.open("file-1")
        stream.write(b" and half")
    with blobs.open("file-1") as stored:
        assert stored.read() == b"half and half"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "files")

    def fail() -> None:
        with blobs.writing("file-1") as stream:
            stream.write(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list((tmp_path / "files").iterdir()) == []


def test_chunks_and_deleting(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "files")
    content = b"x" * (3 << 20)
    with blobs.writing("file-1") as stream:
        stream.write(content)
    stored = blobs.open("file-1")
    assert b"".join(blobs.chunks(stored)) == content
    assert stored.closed
    for _ in range(2):
        blobs.delete("file-1")
    with pytest.raises(NotFoundError):
        blobs.open("file-1")
    assert blobs.free_bytes() > 0
    with pytest.raises(AssertionError):
        blobs.open("../keys.json")
