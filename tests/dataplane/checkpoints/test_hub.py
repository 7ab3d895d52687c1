"""Fetching from a hub on this machine through the hub's own client."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from huggingface_hub import set_client_factory

from dataplane.checkpoints.fetch import fetch_checkpoint
from dataplane.checkpoints.hub import apply_rules
from dataplane.checkpoints.sources import FetchError, FetchRules
from tests.dataplane.registry import COMMIT, Registry, use_as_hub

SOURCE = "hf://org/name@v1.0"
FILES = {"config.json": b"{}", "model.safetensors": bytes(25_000_000), "code.py": b"pass", "onnx/config.json": b"{}"}
CHECKPOINT_BYTES = 25_000_002


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    tree = [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name, content in FILES.items()]
    started = Registry(
        {
            "api/models/org/name/revision/v1.0": json.dumps({"id": "org/name", "sha": COMMIT}).encode(),
            f"api/models/org/name/tree/{COMMIT}?recursive=true&expand=false": json.dumps(tree).encode(),
            **{f"org/name/resolve/{COMMIT}/{name}": content for name, content in FILES.items()},
        }
    )
    use_as_hub(started, tmp_path / "cache", monkeypatch)
    apply_rules.cache_clear()  # the hub's client is one for the process
    yield started
    apply_rules.cache_clear()
    set_client_factory(partial(httpx.Client, follow_redirects=True))
    started.close()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.is_file()}


def test_the_files_of_a_checkpoint_are_downloaded_once_and_progress_is_reported(
    hub: Registry, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    reported: list[tuple[int, int]] = []
    folder = tmp_path / "model"
    fetch_checkpoint(SOURCE, folder, weights=False)
    assert names(folder) == {"config.json"}
    fetch_checkpoint(SOURCE, folder, progress=lambda done, total: reported.append((done, total)))
    assert names(folder) == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len({done for done, _ in reported}) > 2
    assert reported == sorted(reported)
    assert reported[-1] == (CHECKPOINT_BYTES, CHECKPOINT_BYTES)
    assert "".join(capfd.readouterr()) == "", "no progress bar is drawn"
    assert "Bearer hf_secret" in hub.tokens, "for gated repositories"
    hub.requests.clear()
    fetch_checkpoint(SOURCE, folder)
    assert not [name for name, _ in hub.requests if name.endswith("safetensors")]


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"bytes_max": 24_999_999}, r"has 2500000\d bytes; at most 24999999 are fetched"),
        ({"time_max_s": 1e-9}, "took longer than 1e-09 s"),
    ],
)
def test_limits_end_a_fetch(hub: Registry, tmp_path: Path, rules: dict[str, Any], why: str) -> None:
    with pytest.raises(FetchError, match=why):
        fetch_checkpoint(SOURCE, tmp_path / "model", rules=FetchRules(**rules))
    assert "model.safetensors" not in names(tmp_path / "model")


def test_progress_may_end_a_fetch(hub: Registry, tmp_path: Path) -> None:
    def progress(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > 10_000_000:
            raise FetchError("is not wanted any longer")

    with pytest.raises(FetchError, match="not wanted"):
        fetch_checkpoint(SOURCE, tmp_path / "model", progress=progress)
    assert "model.safetensors" not in names(tmp_path / "model")


def test_a_hub_may_be_anywhere_and_its_redirects_may_not(hub: Registry, tmp_path: Path) -> None:
    for target, why in (("https://169.254.169.254/latest", "no public address"), ("http://8.8.8.8/", "plain http")):
        hub.answers += [302] * 9
        hub.location = target
        with pytest.raises(FetchError, match=why):
            fetch_checkpoint(SOURCE, tmp_path / "model")
    assert len(hub.asked("api/models/org/name/revision/v1.0")) == 2


@pytest.mark.parametrize("status", [403, 500])
def test_a_hub_that_refuses_is_an_error_unless_the_folder_is_complete(
    hub: Registry, tmp_path: Path, status: int
) -> None:
    hub.answers += [status] * 9
    with pytest.raises(FetchError, match=f"^{SOURCE} cannot be fetched: .*{status} "):
        fetch_checkpoint(SOURCE, tmp_path / "model")
    hub.answers.clear()
    fetch_checkpoint(SOURCE, tmp_path / "model")
    hub.answers += [status] * 9
    assert fetch_checkpoint(SOURCE, tmp_path / "model") == tmp_path / "model"


@pytest.mark.parametrize("source", ["hf://org/na--me", "hf://org/other"])
def test_a_repository_that_the_hub_has_not(hub: Registry, tmp_path: Path, source: str) -> None:
    with pytest.raises(FetchError, match=f"^{source} cannot be fetched: "):
        fetch_checkpoint(source, tmp_path / "model")


def test_the_configs_of_modules_are_downloaded_and_no_other_folder(hub: Registry, tmp_path: Path) -> None:
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
    added = {"modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": b'{"pooling_mode": "mean"}'}
    for name, content in added.items():
        hub.files[f"org/name/resolve/{COMMIT}/{name}"] = content
    listing = f"api/models/org/name/tree/{COMMIT}?recursive=true&expand=false"
    tree = [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name, content in added.items()]
    hub.files[listing] = json.dumps([*json.loads(hub.files[listing]), *tree]).encode()
    folder = tmp_path / "model"
    fetch_checkpoint(SOURCE, folder, weights=False)
    assert names(folder) == {"config.json", "modules.json"}
    assert (folder / "1_Pooling" / "config.json").read_bytes() == added["1_Pooling/config.json"]
    assert not (folder / "onnx").exists()
