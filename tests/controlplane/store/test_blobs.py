"""A blob is there whole or not at all, in a folder as in a bucket."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.errors import InvalidValueError, NotFoundError, UnavailableError
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.bucket import PART_BYTES
from controlplane.store.blobs.open import open_blobs
from controlplane.store.files import new_file_id
from tests.controlplane.store.s3_server import Bucket
from tests.controlplane.world import served


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def in_bucket(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobStore]:
    with served(bucket.app()) as url:
        for name, value in (("ENDPOINT_URL", url), ("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield open_blobs(Settings(home=tmp_path, files_url=f"s3://{bucket.name}/some/where"))


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return open_blobs(Settings(home=tmp_path))
    found: BlobStore = request.getfixturevalue("in_bucket")
    return found


def write(blobs: BlobStore, content: bytes) -> str:
    name = new_file_id()
    with blobs.writing(name) as stream:
        stream.write(content)
    return name


def test_a_half_written_blob_is_never_seen(blobs: BlobStore) -> None:
    with blobs.writing("file-1") as stream:
        stream.write(b"half")
        stream.flush()
        with pytest.raises(NotFoundError):
            blobs.open("file-1")
        stream.write(b" and half")
    with blobs.open("file-1") as stored:
        assert stored.read() == b"half and half"


def test_a_blobs_name_is_flushed_behind_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut may take the name of a file that was acknowledged."""
    blobs, name, flushed = open_blobs(Settings(home=tmp_path)), new_file_id(), []

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append((is_folder, any(path.name.endswith(name) for path in tmp_path.rglob("*"))))

    monkeypatch.setattr("controlplane.store.blobs.folder.os.fsync", fsync)
    with blobs.writing(name) as target:
        target.write(b"{}")
    assert flushed == [(False, False), (True, True)]


def test_a_failed_write_leaves_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    def fail() -> None:
        with blobs.writing("file-1") as stream:
            stream.write(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert blobs.older_than(-60) == set()


def test_lines_and_chunks_and_deleting(blobs: BlobStore) -> None:
    line = b"x" * 999_999 + b"\n"
    name = write(blobs, line * 10)
    with blobs.open(name) as stored:
        assert list(stored) == [line] * 10
    stored = blobs.open(name)
    assert stored.readline() == line
    assert b"".join(blobs.chunks(stored)) == line * 9
    assert stored.closed
    for _ in range(2):
        blobs.delete(name)
    with pytest.raises(NotFoundError):
        blobs.open(name)
    assert blobs.free_bytes() > 0


def test_reading_begins_where_one_likes(blobs: BlobStore) -> None:
    name = write(blobs, b"one\ntwo\nthree\n")
    with blobs.open(name) as stored:
        for at, line in ((4, b"two\n"), (0, b"one\n"), (8, b"three\n"), (99, b"")):
            stored.seek(at)
            assert stored.readline() == line
    with blobs.open(name) as stored:
        assert (stored.seek(-6, os.SEEK_END), list(stored)) == (8, [b"three\n"])


@pytest.mark.parametrize("name", ["../keys.json", "a/b", "", ".part", "file-1.part.part", "file-1\0", "f\u00e9"])
def test_a_name_that_leads_elsewhere_is_refused(blobs: BlobStore, name: str) -> None:
    for call in (blobs.open, blobs.delete, lambda name: blobs.writing(name).__enter__()):
        with pytest.raises(InvalidValueError, match="letters, digits and dashes") as caught:
            call(name)
        assert caught.value.param == "file_id"


def test_what_is_old_is_found(blobs: BlobStore) -> None:
    name, empty = write(blobs, b"x"), write(blobs, b"")
    assert blobs.older_than(-60) == {name, empty}
    with blobs.open(empty) as stored:
        assert stored.read() == b""


def test_what_others_keep_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    blobs = open_blobs(Settings(home=tmp_path))
    name = write(blobs, b"x")
    (tmp_path / "files" / "what is this.txt").write_bytes(b"x")
    assert blobs.older_than(-60) == {name}


def test_a_blob_that_is_deleted_while_old_ones_are_looked_for_is_left_out(tmp_path: Path) -> None:
    """Its name is still found, and no file."""
    blobs = open_blobs(Settings(home=tmp_path))
    name = write(blobs, b"x")
    (tmp_path / "files" / new_file_id()).symlink_to(tmp_path / "gone")
    assert blobs.older_than(-60) == {name}


def test_a_large_blob_goes_up_in_parts_and_comes_down_in_ranges(bucket: Bucket, in_bucket: BlobStore) -> None:
    content = bytes(2 * PART_BYTES + 5)
    name = write(in_bucket, content)
    assert bucket.written[f"some/where/{name}"][0] == content
    assert bucket.body_max == PART_BYTES
    with in_bucket.open(name) as stored:
        assert stored.read(5) == content[:5]
        assert [method for method, _ in bucket.asked].count("GET") == 1, "only what was asked for has come"
        assert stored.read() == content[5:]
    assert [method for method, _ in bucket.asked].count("GET") >= 3


def test_what_others_keep_in_the_bucket_is_left_alone(bucket: Bucket, in_bucket: BlobStore) -> None:
    bucket.written |= {f"some/where/{name}": (b"x", 0.0) for name in ("report.csv", "a/file-1", "file-mine")}
    bucket.written[new_file_id()] = (b"x", 0.0)
    name = write(in_bucket, b"x")
    assert in_bucket.older_than(-60) == {name}


@pytest.mark.parametrize("trouble", ["refuses", "breaks", "has no bucket"])
def test_a_bucket_that_is_away_says_try_again(bucket: Bucket, in_bucket: BlobStore, trouble: str) -> None:
    name = write(in_bucket, b"x")
    stored = in_bucket.open(name)
    if trouble == "has no bucket":
        bucket.name = "elsewhere"
    bucket.failing = {"refuses": 403, "breaks": 500}.get(trouble)
    for call in (
        lambda: write(in_bucket, b"y"),
        stored.read,
        lambda: in_bucket.open(name),
        lambda: in_bucket.delete(name),
        lambda: in_bucket.older_than(0),
    ):
        with pytest.raises(UnavailableError) as caught:
            call()
        assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
        assert "127.0.0.1" not in caught.value.message, "the log says where it is, a tenant need not know"
    bucket.failing, bucket.name = None, "tide"
    with in_bucket.open(name) as again:
        assert again.read() == b"x"


@pytest.mark.parametrize("url", ["s3://", "http://bucket/x", "s3://bucket?x=1", "bucket"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="files_url"):
        Settings(files_url=url)


def test_a_bucket_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "controlplane.store.blobs.bucket", None)
    with pytest.raises(InvalidValueError, match=r"files_url .*tidepool\[s3\]"):
        open_blobs(Settings(home=tmp_path, files_url="s3://tide"))
