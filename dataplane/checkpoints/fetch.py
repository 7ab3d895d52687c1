"""Download checkpoints into a folder of this node: from a registry over HTTP, or from the Hugging Face hub.

A registry is any web server that has, next to the files of a checkpoint, `manifest.json`:

    {"files": [{"name": "model.safetensors", "size_bytes": 42, "sha256": "..."}]}

A file is downloaded to NAME.part (resumed after a broken connection), checked, renamed, and its checksum kept in
NAME.sha256; a file of the right size and checksum is not downloaded again. A file lock lets one process at a time
download into a folder.
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

from dataplane.checkpoints.sources import PUBLIC, WEIGHTS, FetchError, FetchRules, Progress, open_client

MANIFEST_BYTES_MAX = 2**20
VAIN_ATTEMPTS_MAX = 5
"""Consecutive attempts at a file that receive no byte."""
BACKOFF_MAX_S = 10.0

Result = TypeVar("Result")


class _TransientError(Exception):
    """An attempt failed in a way that the next one may not."""


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the manifest. `name` is a plain file name, perhaps in a folder, so that nothing is written outside of
    the checkpoint's folder.
    """

    name: Annotated[
        str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,199}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
    ]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True):
    """The files of a checkpoint in a registry."""

    files: Annotated[list[RemoteFile], msgspec.Meta(min_length=1)]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore the progress."""


def fetch_checkpoint(
    source: str,
    folder: Path,
    *,
    weights: bool = True,
    progress: Progress = no_progress,
    backoff_s: float = 0.5,
    rules: FetchRules = PUBLIC,
) -> Path:
    """Download the checkpoint `source` into `folder` and return the folder. Blocks; files that are complete are kept.

    `source` is `https://HOST/PATH/` (plain http on this machine alone) or `hf://ORG/NAME[@REVISION]`. After a broken
    connection it tries again, first after `backoff_s`, then after twice as long each time. Without `weights`, the
    config, the tokenizer and the chat template are downloaded only.

    Raises:
        FetchError: the source is unreachable, not allowed by the rules, or no checkpoint; a checksum is wrong, or the
            disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            check_deadline = rules.deadline(source)

            def report(done_bytes: int, total_bytes: int) -> None:
                check_deadline()
                if total_bytes > rules.bytes_max:
                    raise FetchError(f"{source} has {total_bytes} bytes; at most {rules.bytes_max} are fetched")
                progress(done_bytes, total_bytes)

            if source.startswith("hf://"):
                from dataplane.checkpoints.hub import fetch_from_hub  # noqa: PLC0415 - its client imports slowly

                fetch_from_hub(source, folder, weights, report, rules)
            else:
                with open_client(rules) as client:
                    _fetch_from_registry(client, source.rstrip("/"), folder, weights, report, check_deadline, backoff_s)
    except OSError as error:
        raise FetchError(f"{source} cannot be written to {folder}: {error}") from error
    return folder


def _fetch_from_registry(
    client: httpx.Client,
    url: str,
    folder: Path,
    weights: bool,
    progress: Progress,
    check_deadline: Callable[[], None],
    backoff_s: float,
) -> None:
    files = _with_retries(lambda: _read_manifest(client, url, check_deadline), backoff_s)
    files = [file for file in files if weights or not file.name.endswith(WEIGHTS)]
    total_bytes = sum(file.size_bytes for file in files)
    missing = [file for file in files if not _is_complete(folder, file)]
    done_bytes = total_bytes - sum(file.size_bytes for file in missing)
    progress(done_bytes, total_bytes)
    _check_disk_space(url, folder, total_bytes - done_bytes)
    for file in missing:
        download = _Download(client, url, folder, file, partial(_report, progress, done_bytes, total_bytes))
        _with_retries(download.attempt, backoff_s, download.received_bytes)
        done_bytes += file.size_bytes


def _report(progress: Progress, done_before: int, total_bytes: int, received_bytes: int) -> None:
    progress(done_before + received_bytes, total_bytes)


def _read_manifest(client: httpx.Client, url: str, check_deadline: Callable[[], None]) -> list[RemoteFile]:
    body = bytearray()
    with _get(client, f"{url}/manifest.json", {}) as answer:
        for chunk in answer.iter_bytes():
            check_deadline()
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
    """The download of one file. Each attempt resumes where the last one broke off."""

    def __init__(
        self, client: httpx.Client, url: str, folder: Path, file: RemoteFile, progress: Callable[[int], None]
    ) -> None:
        self._client = client
        self._url = f"{url}/{file.name}"
        self._file = file
        self._progress = progress
        self._target = folder / file.name
        self._target.parent.mkdir(exist_ok=True)
        self._partial = folder / f"{file.name}.part"
        self._checksum = folder / f"{file.name}.sha256"

    def received_bytes(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0

    def attempt(self) -> None:
        """Download what is missing, check the whole, and rename it to its final name."""
        start = self.received_bytes()
        if start < self._file.size_bytes or start == 0:
            start = self._receive(start)
        with self._partial.open("rb") as stream:
            checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        if checksum != self._file.sha256:
            self._partial.unlink()
            message = f"{self._url} has the checksum {checksum}, its manifest says {self._file.sha256}"
            raise _TransientError(message) if start else FetchError(message)
        self._checksum.unlink(missing_ok=True)
        self._partial.rename(self._target)
        self._checksum.write_text(checksum, encoding="ascii")

    def _receive(self, start: int) -> int:
        """Append the rest of the file. Returns where the answer began: 0 if the server ignored the range."""
        size_bytes = self._file.size_bytes
        with _get(self._client, self._url, {"Range": f"bytes={start}-"} if start else {}) as answer:
            if answer.status_code != httpx.codes.PARTIAL_CONTENT:
                start = 0
            elif not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise FetchError(f"{answer.url} sends another range than bytes {start}-")
            done_bytes = start
            with self._partial.open("ab") as stream:
                stream.truncate(start)
                for chunk in answer.iter_raw():
                    done_bytes += len(chunk)
                    if done_bytes > size_bytes:
                        stream.truncate(0)
                        raise FetchError(f"{self._url} is larger than the {size_bytes} bytes of the manifest")
                    stream.write(chunk)
                    self._progress(done_bytes)
        if done_bytes < size_bytes:
            raise _TransientError(f"{self._url} ended after {done_bytes} of {size_bytes} bytes")
        return start


@contextmanager
def _get(client: httpx.Client, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
    """The answer to a GET; its body is not read yet.

    Raises:
        FetchError: the server refuses; another attempt would not help.
        _TransientError: no connection, or one that broke; too many requests; an error of the server.
    """
    try:
        with client.stream("GET", url, headers={"Accept-Encoding": "identity", **headers}) as answer:
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
                raise _TransientError(f"{url} answers {answer.status_code}")
            if not answer.is_success:
                raise FetchError(f"{url} answers {answer.status_code}")
            yield answer
    except httpx.TooManyRedirects as error:
        raise FetchError(f"{url} redirects more than {client.max_redirects} times") from error
    except httpx.UnsupportedProtocol as error:
        raise FetchError(f"{url} is neither an https:// nor an hf:// source") from error
    except httpx.TransportError as error:
        raise _TransientError(f"{url} cannot be reached: {error!r}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(f"{url} cannot be fetched: {error!r}") from error


def _with_retries(attempt: Callable[[], Result], backoff_s: float, received_bytes: Callable[[], int] = int) -> Result:
    """Call `attempt` until it succeeds, or until too many attempts in a row received nothing."""
    most_bytes = received_bytes()
    vain = 0
    while True:
        try:
            return attempt()
        except _TransientError as error:
            vain = 0 if received_bytes() > most_bytes else vain + 1
            most_bytes = max(most_bytes, received_bytes())
            if vain == VAIN_ATTEMPTS_MAX:
                raise FetchError(f"{error}; gave up after {vain} attempts that received nothing") from error
        time.sleep(min(backoff_s * 2**vain, BACKOFF_MAX_S))


def _is_complete(folder: Path, file: RemoteFile) -> bool:
    target, checksum = folder / file.name, folder / f"{file.name}.sha256"
    return (
        target.exists()
        and checksum.exists()
        and target.stat().st_size == file.size_bytes
        and checksum.read_text(encoding="ascii") == file.sha256
    )


def _check_disk_space(url: str, folder: Path, missing_bytes: int) -> None:
    received_bytes = sum(partial.stat().st_size for partial in folder.glob("*.part"))
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes - received_bytes > free_bytes:
        raise FetchError(f"{url}: {missing_bytes} bytes are missing, {free_bytes} are free in {folder}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock is a file beside the folder: the hub's client takes any folder that is not empty for a checkpoint when
    the hub refuses.
    """
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
