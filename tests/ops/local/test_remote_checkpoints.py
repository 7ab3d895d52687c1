"""A model's sizes from a registry and from the hub: as from its folder, and without its weights."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dataplane.checkpoints.fetch import fetch_checkpoint
from dataplane.checkpoints.sources import FetchRules
from ops.local.checkpoints import LIKELY_HEADER_BYTES, CheckpointError, describe_checkpoint
from tests.dataplane.registry import Registry, use_as_hub
from tests.ops.local.test_checkpoints import write_checkpoint, write_modules, write_safetensors

HERE = ("127.0.0.1",)
WEIGHTS = {"a": ("BF16", [1000, 1000])}
MANY = {f"layers.{index}.weight": ("BF16", [8, 8]) for index in range(3000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, the header of one longer than what is asked for first."""
    folder = write_checkpoint(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "one.safetensors", WEIGHTS)
    write_safetensors(folder / "two.safetensors", MANY)
    weight_map = dict.fromkeys(WEIGHTS, "one.safetensors") | dict.fromkeys(MANY, "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def registry(folder: Path) -> Iterator[Registry]:
    started = Registry.of(folder)
    yield started
    started.close()


def test_a_registry_is_described_as_its_folder(folder: Path, registry: Registry) -> None:
    assert describe_checkpoint(registry.url, HERE) == describe_checkpoint(folder) | {"path": registry.url}
    assert registry.sent_bytes["one.safetensors"] == LIKELY_HEADER_BYTES
    assert len(registry.asked("two.safetensors")) == 2


def test_a_server_without_ranges_is_not_heard_to_the_end(folder: Path, registry: Registry) -> None:
    registry.ranges = False
    assert describe_checkpoint(registry.url, HERE) == describe_checkpoint(folder) | {"path": registry.url}


def test_an_embedding_model_in_a_registry_is_described_and_fetched(folder: Path, tmp_path: Path) -> None:
    write_modules(folder)
    registry = Registry.of(folder)
    try:
        described = describe_checkpoint(registry.url, HERE)
        assert described == describe_checkpoint(folder) | {"path": registry.url}
        assert described["task"] == "embed"
        fetched = fetch_checkpoint(registry.url, tmp_path / "fetched", rules=FetchRules(private_hosts=HERE))
        assert describe_checkpoint(fetched) == describe_checkpoint(folder) | {"path": str(fetched)}
    finally:
        registry.close()


def _without(name: str) -> Callable[[Registry], None]:
    def spoil(registry: Registry) -> None:
        registry.manifest["files"] = [file for file in registry.manifest["files"] if file["name"] != name]

    return spoil


def _claims(**changes: Any) -> Callable[[Registry], None]:
    def spoil(registry: Registry) -> None:
        for file in registry.manifest["files"]:
            if file["name"] == "one.safetensors":
                file.update(changes)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda registry: registry.answers.append(404), r"/models/tiny/manifest.json answers 404$"),
        (lambda registry: registry.answers.append(302), "plain http is for this machine alone"),
        (lambda registry: registry.manifest.clear(), "is no manifest"),
        (lambda registry: registry.close(), "cannot be read"),
        (_without("config.json"), r"^http://.*/models/tiny/config.json does not exist$"),
        (_without("two.safetensors"), r"^http://.*/models/tiny/two.safetensors does not exist"),
        (_claims(name="../one.safetensors"), "is no manifest"),
        (_claims(size_bytes=1_999_999), r"^http://.*one.safetensors is cut short"),
        (_claims(size_bytes=2**63), "cannot be read"),
        (lambda registry: registry.files.update({"one.safetensors": b"\xff" * 64}), "is no safetensors file"),
    ],
)
def test_what_is_wrong_is_said(registry: Registry, spoil: Callable[[Registry], None], words: str) -> None:
    spoil(registry)
    with pytest.raises(CheckpointError, match=words):
        describe_checkpoint(registry.url, HERE)


def test_plain_http_stays_on_this_machine() -> None:
    with pytest.raises(CheckpointError, match="plain http is for this machine alone"):
        describe_checkpoint("http://example.org/tiny/")


class DripHandler(BaseHTTPRequestHandler):
    """Sends what is asked a byte at a time, for longer than anybody should wait."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3000")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for _ in range(3000):
                self.wfile.write(b" ")
                time.sleep(0.01)

    def log_message(self, *args: Any) -> None:
        pass


def test_a_server_that_drips_is_given_up() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), DripHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"took longer than 0.2 s"):
            describe_checkpoint(f"http://127.0.0.1:{server.server_port}/tiny/", HERE, time_max_s=0.2)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A hub with the repository `org/tiny`, revision `v1`."""
    started = Registry({f"org/tiny/resolve/v1/{file.name}": file.read_bytes() for file in folder.iterdir()})
    use_as_hub(started, tmp_path / "cache", monkeypatch)
    yield started
    started.close()


def test_the_hub_is_described_as_a_folder(folder: Path, hub: Registry) -> None:
    source = "hf://org/tiny@v1"
    assert describe_checkpoint(source) == describe_checkpoint(folder) | {"path": source}
    assert {"bytes=0-100000", None} <= {asked for _, asked in hub.requests}


def test_an_embedding_model_on_the_hub_is_described_as_a_folder(folder: Path, hub: Registry) -> None:
    write_modules(folder)
    files = [file for file in folder.rglob("*") if file.is_file()]
    hub.files |= {f"org/tiny/resolve/v1/{file.relative_to(folder)}": file.read_bytes() for file in files}
    source = "hf://org/tiny@v1"
    described = describe_checkpoint(source)
    assert described == describe_checkpoint(folder) | {"path": source}
    assert described["task"] == "embed"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://org/tiny@v2", "hf://org/tiny@v2 cannot be read: .*404"),
        ("hf://a/b/c", "hf://a/b/c: not of the form"),
    ],
)
def test_what_the_hub_refuses_is_said(hub: Registry, source: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        describe_checkpoint(source)
    assert "\n" not in str(caught.value)


def test_weights_of_an_unknown_type_on_the_hub(folder: Path, hub: Registry) -> None:
    write_safetensors(folder / "model.safetensors", {"a": ("F4", [8])})
    del hub.files["org/tiny/resolve/v1/model.safetensors.index.json"]
    hub.files["org/tiny/resolve/v1/model.safetensors"] = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="hf://org/tiny@v1 has weights of type F4"):
        describe_checkpoint("hf://org/tiny@v1")
