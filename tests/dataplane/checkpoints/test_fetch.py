"""Fetching from a real server that cuts connections, serves wrong bytes or wrong sizes, or is down."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.checkpoints.fetch import fetch_checkpoint
from dataplane.checkpoints.sources import FetchError, FetchRules
from tests.dataplane.registry import Registry, described

HERE = FetchRules(private_hosts=("127.0.0.1",), bytes_max=2**61)
SMALL, LARGE = b'{"model_type": "llama"}', bytes(range(256)) * 4000


@pytest.fixture
def registry() -> Iterator[Registry]:
    started = Registry({"config.json": SMALL, "model.safetensors": LARGE, "empty.txt": b""})
    yield started
    started.close()


def fetch(registry: Registry, folder: Path, **options: Any) -> Path:
    return fetch_checkpoint(registry.url, folder, backoff_s=0.0, **{"rules": HERE} | options)


def is_whole(folder: Path) -> bool:
    present = {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".sha256"}
    return present == {"config.json": SMALL, "model.safetensors": LARGE, "empty.txt": b""}


def test_all_files_are_downloaded_and_progress_is_reported(registry: Registry, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    folder = fetch(registry, tmp_path / "a" / "b", progress=lambda done, total: reported.append((done, total)))
    total = len(SMALL) + len(LARGE)
    assert folder == tmp_path / "a" / "b"
    assert is_whole(folder)
    assert reported[0] == (0, total)
    assert reported[-1] == (total, total)
    assert reported == sorted(reported)


def test_complete_files_are_not_fetched_again_and_changed_ones_are(registry: Registry, tmp_path: Path) -> None:
    fetch(registry, tmp_path)
    registry.requests.clear()
    fetch(registry, tmp_path)
    assert registry.requests == [("manifest.json", None)]
    (tmp_path / "config.json").write_bytes(SMALL + b" ")
    (tmp_path / "model.safetensors.sha256").write_text("0" * 64)
    registry.requests.clear()
    fetch(registry, tmp_path)
    assert {name for name, _ in registry.requests} == {"manifest.json", "config.json", "model.safetensors"}
    assert is_whole(tmp_path)


def test_a_broken_download_is_resumed(registry: Registry, tmp_path: Path) -> None:
    registry.cuts = [len(SMALL), 1000, 30_000, 1, 0, 0, 500_000]
    fetch(registry, tmp_path)
    assert is_whole(tmp_path)
    asked = [0 if asked is None else int(asked[6:-1]) for asked in registry.asked("model.safetensors")]
    assert asked == [0, 1000, 31_000, 31_001, 31_001, 31_001, 531_001]


def test_a_partial_file_of_an_earlier_process_is_resumed(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(LARGE[:70_000])
    fetch(registry, tmp_path)
    assert registry.asked("model.safetensors") == ["bytes=70000-"]
    assert is_whole(tmp_path)


@pytest.mark.parametrize("partial", [b"something else", LARGE[:-1] + b"x", LARGE + b"x"])
def test_a_partial_file_of_other_content_is_dropped(registry: Registry, tmp_path: Path, partial: bytes) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(partial)
    fetch(registry, tmp_path)
    assert registry.asked("model.safetensors")[-1] is None
    assert is_whole(tmp_path)


def test_a_server_without_ranges_restarts_the_download(registry: Registry, tmp_path: Path) -> None:
    registry.ranges = False
    registry.cuts = [len(SMALL), 1000]
    fetch(registry, tmp_path)
    assert registry.asked("model.safetensors") == [None, "bytes=1000-"]
    assert is_whole(tmp_path)


def test_server_errors_are_retried_a_few_times(registry: Registry, tmp_path: Path) -> None:
    registry.answers = [503, 429, 200, 500]
    fetch(registry, tmp_path / "one")
    assert is_whole(tmp_path / "one")
    registry.answers = [200, *[503] * 99]
    with pytest.raises(FetchError, match=r"config.json answers 503; gave up after 5 attempts that received nothing"):
        fetch(registry, tmp_path / "two")
    registry.answers = []
    registry.cuts = [len(SMALL), *[0] * 99]
    with pytest.raises(FetchError, match=r"cannot be reached: .* gave up after 5 attempts"):
        fetch(registry, tmp_path / "two")


def test_no_server_at_all(registry: Registry, tmp_path: Path) -> None:
    registry.close()
    with pytest.raises(FetchError, match=r"manifest.json cannot be reached: .* gave up after 5 attempts"):
        fetch(registry, tmp_path)


def test_wrong_bytes_are_refused_and_not_kept(registry: Registry, tmp_path: Path) -> None:
    registry.files["model.safetensors"] = LARGE[:-1] + b"!"
    for _ in range(2):
        with pytest.raises(FetchError, match=r"model.safetensors has the checksum \w{64}, its manifest says"):
            fetch(registry, tmp_path)
        assert not list(tmp_path.glob("model.safetensors*"))
    registry.files["model.safetensors"] = LARGE
    fetch(registry, tmp_path)
    assert is_whole(tmp_path)


def test_a_file_that_is_not_as_large_as_its_manifest_says(registry: Registry, tmp_path: Path) -> None:
    registry.files["model.safetensors"] = LARGE * 9
    with pytest.raises(FetchError, match=f"is larger than the {len(LARGE)} bytes of the manifest"):
        fetch(registry, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.glob("model.*")) == 0
    registry.files["model.safetensors"] = LARGE[:5]
    with pytest.raises(FetchError, match=f"ended after 5 of {len(LARGE)} bytes; gave up"):
        fetch(registry, tmp_path)


GOOD = described("config.json", SMALL)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"files": [{**GOOD, "name": "../config.json"}]}, "is no manifest: .*name"),
        ({"files": [{**GOOD, "name": "/etc/passwd"}]}, "is no manifest: .*name"),
        ({"files": [{**GOOD, "name": "folder/../../config.json"}]}, "is no manifest: .*name"),
        ({"files": [{**GOOD, "name": "folder/.hidden"}]}, "is no manifest: .*name"),
        ({"files": [{**GOOD, "name": ".."}]}, "is no manifest: .*name"),
        ({"files": [{**GOOD, "name": "a\n"}]}, "is no manifest: .*name"),
        ({"files": [{**GOOD, "size_bytes": -1}]}, "is no manifest: .*size_bytes"),
        ({"files": [{**GOOD, "sha256": "abc"}]}, "is no manifest: .*sha256"),
        ({"files": []}, "is no manifest"),
        ([], "is no manifest"),
        ({"files": [GOOD, GOOD]}, "names a file twice"),
        ({"files": [GOOD, {**GOOD, "name": "config.json.part"}]}, "names a file twice"),
        ({"files": [{**GOOD, "size_bytes": 2**60}]}, "bytes are missing, .* are free"),
        ({"files": [GOOD], "more": "x" * 2**20}, "larger than 1048576 bytes"),
        ({"files": [{**GOOD, "name": "nowhere"}]}, "nowhere answers 404"),
    ],
)
def test_a_bad_manifest_writes_nothing(registry: Registry, tmp_path: Path, manifest: Any, message: str) -> None:
    registry.manifest = manifest
    registry.answers = [200, 404]
    with pytest.raises(FetchError, match=message):
        fetch(registry, tmp_path / "folder")
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("source", ["http://example.org/models", "ftp://127.0.0.1/models", "models", "hf://no-name"])
def test_invalid_sources_are_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(FetchError, match=r"plain http|neither an https|not of the form"):
        fetch_checkpoint(source, tmp_path, backoff_s=0.0)


def test_a_redirect_does_not_lead_to_plain_http(registry: Registry, tmp_path: Path) -> None:
    registry.answers = [302]
    with pytest.raises(FetchError, match=r"http://example.org/elsewhere: plain http is for this machine alone"):
        fetch(registry, tmp_path)


def test_a_folder_that_cannot_be_written(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.part").mkdir()
    with pytest.raises(FetchError, match="cannot be written to"):
        fetch(registry, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match="cannot be written to"):
        fetch(registry, tmp_path / "file")


def test_two_at_once_fetch_once(registry: Registry, tmp_path: Path) -> None:
    threads = [threading.Thread(target=fetch, args=(registry, tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_whole(tmp_path)
    assert len(registry.asked("model.safetensors")) == 1


def test_waits_grow_and_are_bounded(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    registry.answers = [503] * 99
    with pytest.raises(FetchError, match="answers 503"):
        fetch_checkpoint(registry.url, tmp_path, backoff_s=1.0, rules=HERE)
    assert waits == [2.0, 4.0, 8.0, 10.0]
