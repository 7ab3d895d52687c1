"""The HTTP client of commands: the API's address and key, and its errors as one line."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from ops.client.credentials import CredentialError, admin_key, api_url, client_key

if TYPE_CHECKING:
    import httpx2 as httpx

PAGE_ROWS = 100
TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 600.0
_KEY_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_THIS_MACHINE = frozenset({"127.0.0.1", "::1", "localhost"})
_NAMES_WITH_SLASHES = frozenset({"/admin/models", "/admin/aliases"})


class CommandError(Exception):
    """A command failed; the message is the one line that its user sees. `status`: the API's, where it refused."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(CommandError):
    """The API cannot be asked: it is away, does not answer in time, or what answers is something else."""


def path_to(collection: str, name: str, *rest: str) -> str:
    """The path of one thing in a collection, with its name quoted. `rest`: what of it, such as "drain".

    Raises:
        CommandError: the path of that name would be the path of something else.
    """
    parts = name.split("/")
    if not name or not {".", ".."}.isdisjoint(parts) or (len(parts) > 1 and collection not in _NAMES_WITH_SLASHES):
        raise CommandError(f"'{name}' cannot be a name or an id in {collection}")
    return "/".join([collection, quote(name), *rest])


@dataclass(frozen=True, kw_only=True)
class Target:
    """Address and key of the global options; None: from the environment and the home folder."""

    url: str | None
    key: str | None


class Api:
    """A connection to the API. Every call returns decoded JSON or raises CommandError. `key_source`: the origin of the
    key, which the message of a refusal names.
    """

    def __init__(self, client: "httpx.Client", key_source: str | None = None) -> None:
        self._client = client
        self._key_source = key_source

    @property
    def url(self) -> str:
        return str(self._client.base_url).rstrip("/")

    def get(self, path: str, **query: Any) -> Any:
        """Read something; a query that is None is left out."""
        return self.send("GET", path, params={name: value for name, value in query.items() if value is not None})

    def probe(self, path: str) -> Any:
        """The answer of a probe, whatever its status.

        Raises:
            CommandError: the API is unavailable.
        """
        with self._translated():
            return self._client.get(path).json()

    def put(self, path: str, body: dict[str, Any]) -> Any:
        return self.send("PUT", path, json=body)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.send("POST", path) if body is None else self.send("POST", path, json=body)

    def delete(self, path: str) -> Any:
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
        with self._translated():
            answer = self._client.send(self._built(method, path, **request))
            self._check(answer)
            return answer.json()

    def _built(self, method: str, path: str, **request: Any) -> "httpx.Request":
        """The request. Python reads `inf` and `nan` as numbers, which JSON does not have."""
        try:
            return self._client.build_request(method, path, **request)
        except ValueError as error:
            raise CommandError(f"{method} {path} cannot be sent: {error}") from None

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        """The bytes of a download, piece by piece."""
        with self._translated(), self._client.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
            self._check(answer)
            yield answer.iter_bytes()

    def _check(self, answer: "httpx.Response") -> None:
        if not answer.is_error:
            return
        message = _error_text(answer)
        if self._key_source is not None and answer.status_code in _KEY_REFUSED:
            message += f"; the key is from {self._key_source}: set TIDEPOOL_ADMIN_KEY, or give --key"
        raise CommandError(message, status=answer.status_code)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        import httpx2 as httpx

        try:
            yield
        except httpx.TimeoutException:
            raise UnreachableError(f"{self._client.base_url} did not answer in time") from None
        except httpx.TransportError as error:
            hint = "; is `tidepool up` running?" if self._client.base_url.host in _THIS_MACHINE else ""
            raise UnreachableError(f"{self._client.base_url} cannot be reached: {error}{hint}") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UnreachableError(f"'{self._client.base_url}' is no address: {error}") from None
        except json.JSONDecodeError:
            raise UnreachableError(f"{self._client.base_url} answered something that is not JSON") from None


@contextmanager
def open_api(url: str, key: str, *, key_source: str | None = None) -> Iterator[Api]:
    """A connection with a key.

    Raises:
        CommandError: the address or the key cannot be used.
    """
    import httpx2 as httpx

    from dataplane.protocol.tls import client_context

    authorities = os.environ.get("TIDEPOOL_TLS_CA_FILE")
    try:
        verify = client_context(Path(authorities) if authorities else None)
    except ValueError as error:
        raise CommandError(f"setting TIDEPOOL_TLS_CA_FILE: {error}") from None
    headers = {"Authorization": f"Bearer {key}"}
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=verify)
    except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
        raise CommandError(f"'{url}' or the key cannot be used: {error}") from None
    with client:
        yield Api(client, key_source)


@contextmanager
def connected(context: typer.Context, *, as_client: bool = False) -> Iterator[Api]:
    """The API that the global options and the environment name. `as_client`: with the key of a client, if one is set.

    Raises:
        CommandError: there is no key, or the API cannot be reached.
    """
    target = context.obj
    assert isinstance(target, Target), "the callback of the app sets it"
    find = client_key if as_client else admin_key
    try:
        url, key = api_url(target.url, os.environ), find(target.key, os.environ)
    except CredentialError as error:
        raise CommandError(str(error)) from None
    with open_api(url, key.secret, key_source=key.source) as api:
        yield api


def _error_text(answer: "httpx.Response") -> str:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    error = body.get("error") if isinstance(body, dict) else None
    detail = error.get("message") if isinstance(error, dict) else body.get("detail") if isinstance(body, dict) else None
    return f"{detail or answer.reason_phrase or 'refused'} ({answer.status_code})"
