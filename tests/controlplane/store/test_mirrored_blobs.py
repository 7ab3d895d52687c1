"""Two stores for files: what was accepted is read after the loss of either."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from pydantic import ValidationError

from controlplane.errors import NotFoundError, UnavailableError
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.blobs.mirrored import MirroredBlobs
from controlplane.store.blobs.open import open_blobs
from controlplane.store.files import new_file_id

CONTENT = b"a line\n" * 1000


class Failing(FolderBlobs):
    """A store that can be away, or fail when a blob is complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.away = self.fails_at_the_end = False

    def _check(self) -> None:
        if self.away:
            raise UnavailableError("away")

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        self._check()
        with super().writing(file_id) as stream:
            yield stream
            if self.fails_at_the_end:
                raise OSError("no space left")

    def open(self, file_id: str) -> IO[bytes]:
        self._check()
        return super().open(file_id)

    def delete(self, file_id: str) -> None:
        self._check()
        super().delete(file_id)


class Mirror:
    """Two failing stores and the store of both."""

    def __init__(self, folder: Path, *, at_once: bool = True) -> None:
        self.folder = folder
        self.near, self.far = Failing(folder / "near"), Failing(folder / "far")
        self.both = MirroredBlobs(self.near, self.far, at_once=at_once)

    def write(self) -> str:
        name = new_file_id()
        with self.both.writing(name) as stream:
            stream.write(CONTENT[:7])
            stream.flush()
            stream.write(CONTENT[7:])
        return name

    def names(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path)


def read(blobs: BlobStore, name: str) -> bytes:
    return b"".join(blobs.chunks(blobs.open(name)))


@pytest.mark.parametrize("lost", ["near", "far"])
def test_an_accepted_file_outlives_the_loss_or_the_absence_of_either_store(mirror: Mirror, lost: str) -> None:
    name = mirror.write()
    getattr(mirror, lost).away = True
    assert read(mirror.both, name) == CONTENT
    getattr(mirror, lost).away = False
    shutil.rmtree(mirror.folder / lost)
    (mirror.folder / lost).mkdir()
    assert read(mirror.both, name) == CONTENT
    assert mirror.both.lacking_a_copy(-60) == {name}
    assert mirror.both.copy_missing(name)
    assert not mirror.both.copy_missing(name)
    assert read(getattr(mirror, lost), name) == CONTENT


@pytest.mark.parametrize("broken", ["near", "far"])
@pytest.mark.parametrize("fault", ["away", "fails_at_the_end"])
def test_what_only_one_store_would_have_is_refused_and_leaves_nothing(mirror: Mirror, broken: str, fault: str) -> None:
    setattr(getattr(mirror, broken), fault, True)
    with pytest.raises(UnavailableError) as raised:
        mirror.write()
    assert raised.value.status == 503
    assert mirror.names() == set()


def test_a_client_that_breaks_off_leaves_nothing(mirror: Mirror) -> None:
    def break_off() -> None:
        with mirror.both.writing("file-1") as stream:
            stream.write(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert mirror.names() == set()


def test_a_copy_may_be_made_later(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, at_once=False)
    mirror.far.away = True
    name = mirror.write()
    mirror.far.away = False
    assert read(mirror.both, name) == CONTENT
    assert mirror.both.lacking_a_copy(-60) == {name}
    assert mirror.both.copy_missing(name)
    assert read(mirror.far, name) == CONTENT


def test_nobody_says_that_a_file_is_gone_while_a_store_is_away(mirror: Mirror) -> None:
    name = new_file_id()
    with pytest.raises(NotFoundError):
        mirror.both.open(name)
    for away in (mirror.near, mirror.far):
        away.away = True
        with pytest.raises(UnavailableError):
            mirror.both.open(name)
        away.away = False


def test_what_a_store_that_was_away_keeps_is_found_when_it_is_back(mirror: Mirror) -> None:
    name = mirror.write()
    mirror.far.away = True
    mirror.both.delete(name)
    mirror.far.away = False
    assert mirror.both.older_than(-60) == {name}
    mirror.both.delete(name)
    assert mirror.names() == set()


def test_the_second_store_is_a_setting(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", files_copy_url=f"file://{tmp_path}/second")
    blobs = open_blobs(settings)
    with blobs.writing("file-1") as stream:
        stream.write(CONTENT)
    assert (tmp_path / "second" / "file-1").read_bytes() == (tmp_path / "home" / "files" / "file-1").read_bytes()
    assert blobs.free_bytes() > 0
    with pytest.raises(ValidationError, match="files_copy_url"):
        Settings(files_copy_url="https://example.com/bucket")
