"""Checkpoints from elsewhere into a folder of this node: from a registry over HTTP, or from the Hugging Face hub.

A registry is any web server that has, next to the files of a checkpoint, `manifest.json`:

    {"files": [{"name": "model.safetensors", "size_bytes": 42, "sha256": "..."}]}

A file is downloaded to NAME.part (resumed where it broke off), checked, renamed, and its checksum kept in NAME.sha256;
a file of the right size and checksum is not downloaded again. Processes that fetch into one folder take turns.
"""

import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import httpx2 as httpx
import msgspec

from dataplane.checkpoints.hub import fetch_from_hub
from dataplane.checkpoints.sources import PUBLIC, WEIGHTS, FetchError, FetchRules, Progress, open_client

MANIFEST_BYTES_MAX = 2**20
FRUITLESS_ATTEMPTS_MAX = 5
"""Attempts at a file, one after the other, of which none brought a byte."""
BACKOFF_MAX_S = 10.0

Result = TypeVar("Result")


class _TryAgainError(Exception):
    """This attempt failed in a way that the next one may not."""


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the manifest. `name` is a plain file name, so that nothing is written outside of the folder."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True):
    """What a registry says of a checkpoint."""

    files: Annotated[list[RemoteFile], msgspec.Meta(min_length=1)]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Tell nobody."""


def fetch_checkpoint(
    source: str,
    folder: Path,
    *,
    weights: bool = True,
    progress: Progress = no_progress,
    backoff_s: float = 0.5,
    rules: FetchRules = PUBLIC,
) -> Path:
    """Bring what `source` names into `folder`, and return that. Blocks; what is there already is not fetched again.

    `source` is `https://HOST/PATH/` (plain http on this machine alone) or `hf://ORG/NAME[@REVISION]`. After a broken
    connection it tries again, first after `backoff_s`, then after twice as long each time. Without `weights`, all else
    is fetched: the config, the tokenizer, the chat template.

    Raises:
        FetchError: the source is unreachable, not allowed by the rules, or no checkpoint; a checksum is wrong, or the
            disk has no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if source.startswith("hf://"):
                fetch_from_hub(source, folder, weights, progress, rules)
            else:
                _fetch_from_registry(source.rstrip("/"), folder, weights, progress, backoff_s, rules)
    except OSError as error:
        raise FetchError(f"{source} cannot be written to {folder}: {error}") from error
    return folder


def _fetch_from_registry(
    url: str, folder: Path, weights: bool, progress: Progress, backoff_s: float, rules: FetchRules
) -> None:
    in_time = rules.deadline(url)

    def told(done_bytes: int, total_bytes: int) -> None:
        in_time()
        progress(done_bytes, total_bytes)

    with open_client(rules) as client:
        files = _patiently(lambda: _read_manifest(client, url, in_time), backoff_s)
        files = [file for file in files if weights or not file.name.endswith(WEIGHTS)]
        total_bytes = sum(file.size_bytes for file in files)
        missing = [file for file in files if not _is_there(folder, file)]
        done_bytes = total_bytes - sum(file.size_bytes for file in missing)
        if total_bytes > rules.bytes_max:
            raise FetchError(f"{url} has {total_bytes} bytes; at most {rules.bytes_max} are fetched")
        _check_room(url, folder, total_bytes - done_bytes)
        told(done_bytes, total_bytes)
        for file in missing:
            download = _Download(client, url, folder, file, partial(_shifted, told, done_bytes, total_bytes))
            _patiently(download.attempt, backoff_s, download.part_bytes)
            done_bytes += file.size_bytes


def _read_manifest(client: httpx.Client, url: str, in_time: Callable[[], None]) -> list[RemoteFile]:
    body = bytearray()
    with _answer(client, f"{url}/manifest.json", {}) as answer:
        for chunk in answer.iter_bytes():
            in_time()
            body += chunk
            if len(body) > MANIFEST_BYTES_MAX:
                raise FetchError(f"{url}/manifest.json is larger than {MANIFEST_BYTES_MAX} bytes")
    try:
        files = msgspec.json.decode(body, type=Manifest).files
    except msgspec.DecodeError as error:
        raise FetchError(f"{url}/manifest.json is no manifest: {error}") from error
    names = {name for file in files for name in (file.name, f"{file.name}.part", f"{file.name}.sha256")}
    if len(names) != 3 * len(files):
        raise FetchError(f"{url}/manifest.json names a file twice")
    return files


class _Download:
    """One file on its way. Each attempt goes on where the last one broke off."""

    def __init__(
        self, client: httpx.Client, url: str, folder: Path, file: RemoteFile, progress: Callable[[int], None]
    ) -> None:
        self._client = client
        self._url = f"{url}/{file.name}"
        self._file = file
        self._progress = progress
        self._target = folder / file.name
        self._part = folder / f"{file.name}.part"
        self._checksum = folder / f"{file.name}.sha256"

    def part_bytes(self) -> int:
        """Bytes that are here already."""
        return self._part.stat().st_size if self._part.exists() else 0

    def attempt(self) -> None:
        """Download what is missing, check the whole, and put it in its place."""
        start = self.part_bytes()
        if start < self._file.size_bytes or start == 0:
            start = self._receive(start)
        with self._part.open("rb") as stream:
            checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        if checksum != self._file.sha256:
            self._part.unlink()
            message = f"{self._url} has the checksum {checksum}, its manifest says {self._file.sha256}"
            raise _TryAgainError(message) if start else FetchError(message)
        self._checksum.unlink(missing_ok=True)
        self._part.rename(self._target)
        self._checksum.write_text(checksum, encoding="ascii")

    def _receive(self, start: int) -> int:
        """Append the rest of the file to the part; returns where the server began, which need not be `start`."""
        size_bytes = self._file.size_bytes
        with _answer(self._client, self._url, {"Range": f"bytes={start}-"} if start else {}) as answer:
            done_bytes = start = _first_byte(answer, start)
            with self._part.open("ab") as part:
                part.truncate(start)
                for chunk in answer.iter_raw():
                    done_bytes += len(chunk)
                    if done_bytes > size_bytes:
                        part.truncate(0)
                        raise FetchError(f"{self._url} is larger than the {size_bytes} bytes of the manifest")
                    part.write(chunk)
                    self._progress(done_bytes)
        if done_bytes < size_bytes:
            raise _TryAgainError(f"{self._url} ended after {done_bytes} of {size_bytes} bytes")
        return start


def _first_byte(answer: httpx.Response, asked: int) -> int:
    """Where an answer begins: a server may well send the whole file instead of the range that was asked for."""
    if answer.status_code != httpx.codes.PARTIAL_CONTENT:
        return 0
    if not answer.headers.get("Content-Range", "").startswith(f"bytes {asked}-"):
        raise FetchError(f"{answer.url} sends another range than bytes {asked}-")
    return asked


@contextmanager
def _answer(client: httpx.Client, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
    """The answer to a GET, its body still to be read.

    Raises:
        FetchError: the server refuses; another attempt would not help.
        _TryAgainError: no connection, or one that broke; too many requests; an error of the server.
    """
    try:
        with client.stream("GET", url, headers={"Accept-Encoding": "identity", **headers}) as answer:
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
                raise _TryAgainError(f"{url} answers {answer.status_code}")
            if not answer.is_success:
                raise FetchError(f"{url} answers {answer.status_code}")
            yield answer
    except httpx.TooManyRedirects as error:
        raise FetchError(f"{url} redirects more than {client.max_redirects} times") from error
    except httpx.UnsupportedProtocol as error:
        raise FetchError(f"{url} is neither an https:// nor an hf:// source") from error
    except httpx.TransportError as error:
        raise _TryAgainError(f"{url} cannot be reached: {error!r}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(f"{url} cannot be fetched: {error!r}") from error


def _patiently(attempt: Callable[[], Result], backoff_s: float, done_bytes: Callable[[], int] = lambda: 0) -> Result:
    """Try until it works, or until too many attempts in a row brought nothing."""
    most_bytes = done_bytes()
    fruitless = 0
    while True:
        try:
            return attempt()
        except _TryAgainError as error:
            fruitless = 0 if done_bytes() > most_bytes else fruitless + 1
            most_bytes = max(most_bytes, done_bytes())
            if fruitless == FRUITLESS_ATTEMPTS_MAX:
                raise FetchError(f"{error}; gave up after {fruitless} attempts that brought nothing") from error
        time.sleep(min(backoff_s * 2**fruitless, BACKOFF_MAX_S))


def _shifted(progress: Progress, before_bytes: int, total_bytes: int, done_bytes: int) -> None:
    progress(before_bytes + done_bytes, total_bytes)


def _is_there(folder: Path, file: RemoteFile) -> bool:
    target, checksum = folder / file.name, folder / f"{file.name}.sha256"
    return (
        target.exists()
        and checksum.exists()
        and target.stat().st_size == file.size_bytes
        and checksum.read_text(encoding="ascii") == file.sha256
    )


def _check_room(url: str, folder: Path, missing_bytes: int) -> None:
    present_bytes = sum(part.stat().st_size for part in folder.glob("*.part"))
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes - present_bytes > free_bytes:
        raise FetchError(f"{url}: {missing_bytes} bytes are missing, {free_bytes} are free in {folder}")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
