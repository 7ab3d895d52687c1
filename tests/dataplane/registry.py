"""A web server that has a checkpoint, in a thread: it knows Range requests, and breaks off or refuses on demand."""

import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

COMMIT = "0123456789" * 4
"""Of every repository of a hub."""


class Registry:
    """A registry of one checkpoint. `answers` are the statuses of its next answers; `cuts` the bytes after which the
    next files break off. With the hub's paths as names of files it is a hub.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.manifest: Any = {"files": [described(name, content) for name, content in files.items()]}
        self.cuts: list[int] = []
        self.answers: list[int] = []
        self.location = "http://example.org/elsewhere"
        self.ranges = True
        self.sent_bytes: dict[str, int] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.tokens: set[str | None] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/models/tiny/"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @classmethod
    def of(cls, folder: Path) -> Self:
        """A registry that has what is in a folder."""
        files = [file for file in folder.rglob("*") if file.is_file()]
        return cls({str(file.relative_to(folder)): file.read_bytes() for file in files})

    def asked(self, name: str) -> list[str | None]:
        """The Range headers of the requests for a file."""
        return [asked for path, asked in self.requests if path == name]


class Handler(BaseHTTPRequestHandler):
    def __init__(self, registry: Registry, *args: Any) -> None:
        self._registry = registry
        super().__init__(*args)

    def do_GET(self) -> None:
        registry = self._registry
        name = self.path.removeprefix("/models/tiny/")
        asked = self.headers.get("Range")
        registry.requests.append((name, asked))
        registry.tokens.add(self.headers.get("Authorization"))
        if registry.answers and (status := registry.answers.pop(0)) != 200:
            self._answer(status, b"", {"Location": registry.location})
        elif name == "manifest.json":
            self._answer(200, json.dumps(registry.manifest).encode(), {})
        elif name not in registry.files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif asked is not None and registry.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            content = registry.files[name]
            end = min(int(last) + 1, len(content)) if last else len(content)
            registry.sent_bytes[name] = registry.sent_bytes.get(name, 0) + end - int(first)
            self._answer(206, content[int(first) : end], {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"})
        else:
            self._answer(200, registry.files[name], {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        hub = {"ETag": f'"{hash(body)}"', "X-Repo-Commit": COMMIT}
        for name, value in {"Content-Length": str(len(body)), **hub, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            is_file = not self.path.endswith("manifest.json")
            self.wfile.write(body[: self._registry.cuts.pop(0)] if is_file and self._registry.cuts else body)

    def log_message(self, *args: Any) -> None:
        pass


def use_as_hub(registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a registry the hub of this process, with the files `REPOSITORY/resolve/REVISION/NAME`."""
    endpoint = registry.url.rstrip("/")
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": False,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


def described(name: str, content: bytes, **changes: Any) -> dict[str, Any]:
    return {"name": name, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **changes}
