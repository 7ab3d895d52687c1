"""The console's built files, which are read and compressed once; `dist/` is what `ops/console` builds.

Names under `assets/` contain a hash of their content, so browsers keep them for a year. The page itself names them, and
is asked for anew each time.
"""

import functools
import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response

from controlplane.errors import TidepoolError

PAGE = "index.html"
ASSETS = "assets/"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_KEEP, _ASK = "public, max-age=31536000, immutable", "no-cache"
_LINKS = re.compile(rb'((?:src|href)=")(?:\./|/ui/)')


class NotBuiltError(TidepoolError):
    """This installation has no console: its files were not built."""

    status = 503
    code = "console_not_built"
    retry_helps = False


@dataclass(frozen=True, kw_only=True)
class BuiltFile:
    """One file, plain and compressed."""

    content: bytes
    compressed: bytes
    media_type: str
    cache_control: str
    tag: str

    def response(self, request: Request) -> Response:
        """The file, compressed where the browser accepts it; 304 where the browser has it."""
        is_gzip = _accepts_gzip(request.headers.get("accept-encoding", ""))
        tag = f'"{self.tag}-gzip"' if is_gzip else f'"{self.tag}"'
        headers = {"Cache-Control": self.cache_control, "ETag": tag, "Vary": "Accept-Encoding"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if is_gzip:
            headers["Content-Encoding"] = "gzip"
        content = self.compressed if is_gzip else self.content
        return Response(content, media_type=self.media_type, headers=headers)


class ConsoleFiles:
    """The files of a folder, by their path in it."""

    def __init__(self, folder: Traversable) -> None:
        self._contents = dict(_read(folder, "")) if folder.is_dir() else {}
        self._files = {name: _built(name, content) for name, content in self._contents.items() if name != PAGE}
        self._pages: dict[str, BuiltFile] = {}

    def find(self, path: str) -> BuiltFile | None:
        """The file at a path under `/ui/`; None: it is none, and the page answers it."""
        return self._files.get(path)

    def page(self, root: str) -> BuiltFile:
        """The page, with the paths of its assets under `root`, which is empty but behind a proxy that adds a prefix.

        Raises:
            NotBuiltError: there is none.
        """
        if PAGE not in self._contents:
            raise NotBuiltError("the console was not built: run `npm ci && npm run build` in ops/console")
        if root not in self._pages:
            linked = _LINKS.sub(rb"\g<1>" + f"{root}/ui/".encode(), self._contents[PAGE])
            self._pages = {root: _built(PAGE, linked)}  # a process has one root
        return self._pages[root]


@functools.cache
def built_console() -> ConsoleFiles:
    """The files of this installation."""
    return ConsoleFiles(files("controlplane.api.console") / "dist")


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        elif not entry.name.startswith("."):
            yield prefix + entry.name, entry.read_bytes()


def _built(name: str, content: bytes) -> BuiltFile:
    return BuiltFile(
        content=content,
        compressed=gzip.compress(content, mtime=0),
        media_type=_MEDIA_TYPES.get(PurePath(name).suffix, "application/octet-stream"),
        cache_control=_KEEP if name.startswith(ASSETS) else _ASK,
        tag=hashlib.sha256(content).hexdigest()[:32],
    )


def _accepts_gzip(accepted: str) -> bool:
    """Whether a header `Accept-Encoding` names gzip, and not with the weight 0."""
    for each in accepted.lower().split(","):
        coding, _, weight = each.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
