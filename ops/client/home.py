"""The home folder: the first keys in `keys.json`, the ports and passwords of embedded servers in `embedded.json`, and
the address of the API of a running `tidepool up` in `api-url`.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_API_URL = "api-url"


class EmbeddedError(Exception):
    """An embedded server cannot be prepared or started; the message says how to mend it."""


def home_of(environment: Mapping[str, str]) -> Path:
    """The home folder, as `tidepool up` finds it."""
    return Path(environment.get("TIDEPOOL_HOME") or "~/.tidepool").expanduser()


def is_of_up(home: Path) -> bool:
    """Whether `tidepool up` keeps servers of its own here, of one region or of several. It makes its keys itself."""
    return (home / "embedded.json").exists() or (home / "regions").is_dir()


def refuse_home_of_up(home: Path, environment: Mapping[str, str]) -> None:
    """Refuse a command that is for a database which the environment names, where the home has one of its own.

    Raises:
        EmbeddedError: it has, and TIDEPOOL_DATABASE_URL is not set.
    """
    if not environment.get("TIDEPOOL_DATABASE_URL") and is_of_up(home):
        raise EmbeddedError(
            f"the database of {home} (TIDEPOOL_HOME) is that of `tidepool up`, which migrates it and makes its keys at"
            " each start: restart it; for another database set TIDEPOOL_DATABASE_URL"
        )


def keys_file(home: Path) -> Path:
    """The file of the first keys."""
    return home / "keys.json"


def read_secrets(home: Path) -> dict[str, str]:
    """The secrets of keys.json by role; none where there is no such file.

    Raises:
        EmbeddedError: it cannot be read, or is no JSON object of secrets.
    """
    path = keys_file(home)
    kept = _read_json(path)
    if not isinstance(kept, dict) or not all(isinstance(secret, str) for secret in kept.values()):
        raise EmbeddedError(f"{path} must be a JSON object of secrets by role")
    return kept


def write_secrets(home: Path, kept: dict[str, str]) -> None:
    """Write keys.json, readable by its owner only, atomically."""
    write_secret(keys_file(home), json.dumps(kept, indent=2) + "\n")


def write_api_url(home: Path, url: str) -> None:
    """Store the address of the API for commands of the same home."""
    write_secret(home / _API_URL, f"{url}\n")


def read_api_url(home: Path) -> str | None:
    """The address of the API of `tidepool up`; None while it does not run.

    Raises:
        EmbeddedError: the file cannot be read.
    """
    try:
        return (home / _API_URL).read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EmbeddedError(f"{home / _API_URL} cannot be read: {error}") from error


def forget_api_url(home: Path) -> None:
    """Remove the address of the API, which has ended."""
    (home / _API_URL).unlink(missing_ok=True)


def make_home(home: Path) -> None:
    """Create the home folder if it is missing.

    Raises:
        EmbeddedError: it cannot be made, or this user may not write there.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmbeddedError(f"{home} (TIDEPOOL_HOME) cannot be made: {error.strerror}") from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise EmbeddedError(f"{home} (TIDEPOOL_HOME) may not be written by uid {os.geteuid()}")


def remember(home: Path, name: str, port: int, secret: str | None = None) -> None:
    """Store a server's port in embedded.json, and its password: the given one, the one it has, or a new one.

    Raises:
        EmbeddedError: embedded.json cannot be read.
    """
    notes = _notes(home)
    kept = secret or notes.get(name, {}).get("password") or secrets.token_urlsafe(24)
    write_secret(home / "embedded.json", json.dumps(notes | {name: {"port": port, "password": kept}}, indent=2))


def remembered_port(home: Path, name: str) -> int | None:
    """The port that an embedded server had last; None: there was none.

    Raises:
        EmbeddedError: embedded.json cannot be read.
    """
    port = _notes(home).get(name, {}).get("port")
    return None if port is None else int(port)


def password(home: Path, name: str) -> str:
    """The stored password of a server.

    Raises:
        EmbeddedError: none is stored, or embedded.json cannot be read.
    """
    try:
        return str(_notes(home)[name]["password"])
    except KeyError:
        raise EmbeddedError(
            f"{home / 'embedded.json'} has no password for {name}: it was not prepared, or the file is lost"
        ) from None


def _notes(home: Path) -> dict[str, dict[str, str | int]]:
    path = home / "embedded.json"
    notes = _read_json(path)
    if not isinstance(notes, dict) or not all(map(_is_note, notes.values())):
        raise EmbeddedError(f"{path} must be a JSON object of servers, each with its port and its password")
    return notes


def _is_note(note: object) -> bool:
    """Whether it is what `remember` writes of a server."""
    return isinstance(note, dict) and isinstance(note.get("port"), int) and isinstance(note.get("password"), str)


def _read_json(path: Path) -> Any:
    """What a file holds; an empty object where there is none.

    Raises:
        EmbeddedError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise EmbeddedError(f"{path} cannot be read: {error}") from error


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(text)
    temporary.replace(path)
