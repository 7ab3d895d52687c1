"""Folders under names that others can guess: links that other users create first are not followed."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dataplane.agent.host_files import HostFiles
from dataplane.memory.model_cache import ModelCache
from dataplane.runtime.private_folder import NotPrivateError, PrivateFolder, find_folder, make_folder
from tests.dataplane.replay_node import settings

OTHER_UID = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
Made = Callable[[Path, Path], None]
"""Creates something under a path as another user, who knows a folder of ours."""


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of ours that others would like to see emptied."""
    file = tmp_path / "ours" / "precious"
    file.parent.mkdir(mode=0o700)
    file.write_text("precious")
    return file


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which all users can write to. There is no shared memory."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("os.path.ismount", lambda _: False)
    return folder


def link(path: Path, ours: Path) -> None:
    path.symlink_to(ours)


def loose(path: Path, ours: Path) -> None:
    path.mkdir()
    path.chmod(0o777)
    (path / "lock").symlink_to(ours / "precious")


def foreign(path: Path, ours: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "lock").symlink_to(ours / "precious")
    os.chown(path, OTHER_UID, OTHER_UID)


def file(path: Path, ours: Path) -> None:
    path.touch()


@pytest.mark.parametrize("made", [link, loose, pytest.param(foreign, marks=as_root), file])
def test_a_name_that_another_user_owns_is_not_used(parent: Path, victim: Path, made: Made) -> None:
    """The agent starts all the same, in a folder that the next one finds again."""
    taken = parent / f"tidepool-{os.geteuid()}"
    made(taken, victim.parent)
    ours = HostFiles(settings(cache_dir=None), "one")
    with capture_logs() as logs:
        ours.open()
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in victim.parent.iterdir()) == ["precious"], "nothing was created through the link"
    root = ours.models.parent.parent
    assert (root.parent, root.stat().st_mode & 0o777) == (parent, 0o700)
    assert root != taken
    assert [str(taken) in line["reason"] for line in logs if line["event"] == "another folder is used"] == [True]
    left = root / "agent-killed"
    left.mkdir(mode=0o700)
    following = HostFiles(settings(cache_dir=None), "two")
    following.open()
    assert following.models.parent.parent == root
    assert not left.exists(), "the folder of a dead agent is removed there too"
    ours.close()
    following.close()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (link, "it is a symbolic link"),
        (loose, "its mode is 0777, which lets others in; chmod 700 it"),
        pytest.param(foreign, f"it belongs to uid {OTHER_UID}", marks=as_root),
        (file, "it is no directory"),
    ],
)
def test_a_folder_of_the_settings_that_is_not_ours_is_refused(
    tmp_path: Path, victim: Path, made: Made, reason: str
) -> None:
    made(tmp_path / "cache", victim.parent)
    with pytest.raises(NotPrivateError, match=reason) as error:
        HostFiles(settings(cache_dir=tmp_path / "cache"), "boot").open()
    assert str(tmp_path / "cache") in error.value.message
    with pytest.raises(NotPrivateError, match=reason):
        ModelCache(tmp_path / "cache", 100)
    assert victim.read_text() == "precious"


def test_an_agent_that_may_not_use_its_folder_logs_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    changes = {
        "NODE": "n1",
        "REGION": "r",
        "GPU_TYPE": "H800",
        "NODE_KEY": "key-of-this-node",
        "ENGINE": "torch",
        "PORT": "0",
        "SLOTS": '[{"gpus": 1, "memory_bytes": 80000000000}]',
        "CACHE_DIR": str(tmp_path / "cache"),
    }
    environment = {**os.environ, **{f"TIDEPOOL_AGENT_{name}": value for name, value in changes.items()}}
    run = subprocess.run(
        [sys.executable, "-m", "ops.cli.main", "agent"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].endswith("chmod 700 it, or name another folder (TIDEPOOL_AGENT_CACHE_DIR)")


def test_a_folder_of_the_settings_may_be_readable_and_what_is_in_it_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    ours = HostFiles(settings(cache_dir=tmp_path), "boot")
    ours.open()
    ModelCache(ours.models, 100)
    assert {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {
        "agent-boot": 0,
        "lock": 0,
        "models": 0,
    }
    ours.close()


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder", "pipe"])
@pytest.mark.parametrize("name", ["lock", "a"])
def test_files_are_plain_and_have_one_name(tmp_path: Path, victim: Path, kind: str, name: str) -> None:
    path = tmp_path / "cache" / name
    path.parent.mkdir(mode=0o700)
    if kind == "symbolic":
        path.symlink_to(victim)
    elif kind == "hard":
        path.hardlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    folder = PrivateFolder(path.parent)
    with pytest.raises(NotPrivateError, match=str(path)):
        folder.open(name, os.O_RDWR | os.O_CREAT)
    if name == "lock":
        with pytest.raises(NotPrivateError, match=str(path)):
            ModelCache(path.parent, 100).acquire("m", 10, lambda view: None)
        with pytest.raises(NotPrivateError, match=str(path)):
            HostFiles(settings(cache_dir=path.parent), "boot").open()
    assert victim.read_text() == "precious"


def test_a_full_disk_is_not_said_to_be_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    given = os.open

    def full(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return given(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/cache/lock'") as caught:
        folder.open("lock", os.O_RDWR | os.O_CREAT)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError):
        folder.open("none", os.O_RDWR)


def test_a_link_with_the_name_of_an_agents_folder_is_left_alone(tmp_path: Path, victim: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    (root / "agent-link").symlink_to(victim.parent)
    ours = HostFiles(settings(cache_dir=root), "boot")
    with capture_logs() as logs:
        ours.open()
    ours.close()
    assert [line["event"] for line in logs] == ["folder is not removed"]
    assert victim.read_text() == "precious"


def test_a_folder_that_is_replaced_later_is_not_followed(tmp_path: Path, victim: Path) -> None:
    folder = PrivateFolder(tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").symlink_to(victim.parent)
    with folder.opened("precious", os.O_RDWR | os.O_CREAT | os.O_TRUNC), folder.inner("in").opened("a", os.O_CREAT):
        pass
    assert victim.read_text() == "precious"
    assert sorted(folder.names()) == ["in", "precious"]
    assert (tmp_path / "moved" / "in" / "a").exists()


def test_two_of_one_user_at_once_have_one_folder(tmp_path: Path) -> None:
    assert find_folder(tmp_path, "name") is None
    first, second = make_folder(tmp_path, "name"), make_folder(tmp_path, "name")
    found = find_folder(tmp_path, "name")
    assert found is not None
    assert first.path == second.path == found.path == tmp_path / "name"


def test_its_descriptor_ends_with_it(tmp_path: Path) -> None:
    descriptor = PrivateFolder(tmp_path / "a").descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
