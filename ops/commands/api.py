"""How commands talk to the API: where it is, with which key, and what its refusals look like to people."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import typer

PAGE_ROWS = 100
TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 600.0


class CommandError(Exception):
    """A command failed; the message is the one line that its user sees. `status`: the API's, where it refused."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Target:
    """The API to talk to. `key` None: the admin key of keys.json in the home folder."""

    url: str
    key: str | None

    def secret(self) -> str:
        """The key to send.

        Raises:
            CommandError: none was given and none is on this machine.
        """
        if self.key:
            return self.key
        file = Path(os.environ.get("TIDEPOOL_HOME", "~/.tidepool")).expanduser() / "keys.json"
        try:
            return str(json.loads(file.read_text())["admin"])
        except FileNotFoundError:
            raise CommandError(f"no key: give --key or TIDEPOOL_KEY ({file} does not exist)") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CommandError(f"no key: give --key or TIDEPOOL_KEY ({file} holds no admin key: {error})") from None


class Api:
    """A connection to the API. Every call returns decoded JSON or raises CommandError."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **query: Any) -> Any:
        """Read something; a query that is None is left out."""
        return self.send("GET", path, params={name: value for name, value in query.items() if value is not None})

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """Write something."""
        return self.send("PUT", path, json=body)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Do something."""
        return self.send("POST", path) if body is None else self.send("POST", path, json=body)

    def delete(self, path: str) -> Any:
        """End something."""
        return self.send("DELETE", path)

    def pages(self, path: str, **query: Any) -> Any:
        """All pages of a list as one."""
        rows: list[Any] = []
        while True:
            page = self.get(path, limit=PAGE_ROWS, **query)
            rows += page["data"]
            if not page["has_more"]:
                return page | {"data": rows}
            query["after"] = page.get("next", page.get("last_id"))

    def send(self, method: str, path: str, **request: Any) -> Any:
        """Any request.

        Raises:
            CommandError: the API is away, or refuses.
        """
        with self._translated():
            answer = self._client.request(method, path, **request)
            _check(answer)
            return answer.json()

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        """The bytes of a download, piece by piece."""
        with self._translated(), self._client.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
            _check(answer)
            yield answer.iter_bytes()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException:
            raise CommandError(f"{self._client.base_url} did not answer in time") from None
        except httpx.TransportError as error:
            raise CommandError(f"{self._client.base_url} cannot be reached: {error}") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise CommandError(f"'{self._client.base_url}' is no address: {error}") from None
        except json.JSONDecodeError:
            raise CommandError(f"{self._client.base_url} answered something that is not JSON") from None


@contextmanager
def open_api(url: str, key: str) -> Iterator[Api]:
    """A connection with a key.

    Raises:
        CommandError: the address or the key cannot be used.
    """
    try:
        headers = {"Authorization": f"Bearer {key}"}
        client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
        raise CommandError(f"'{url}' or the key cannot be used: {error}") from None
    with client:
        yield Api(client)


@contextmanager
def connected(context: typer.Context) -> Iterator[Api]:
    """The API that the global options name."""
    target = context.obj
    assert isinstance(target, Target), "the callback of the app sets it"
    with open_api(target.url, target.secret()) as api:
        yield api


def _check(answer: httpx.Response) -> None:
    if not answer.is_error:
        return
    try:
        body = answer.json()
    except ValueError:
        body = {}
    error = body.get("error") if isinstance(body, dict) else None
    detail = error.get("message") if isinstance(error, dict) else body.get("detail") if isinstance(body, dict) else None
    message = f"{detail or answer.reason_phrase or 'refused'} ({answer.status_code})"
    raise CommandError(message, status=answer.status_code)
