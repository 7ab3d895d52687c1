"""PostgreSQL's own programs for a dump: those on PATH and those of the embedded server's wheel."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psycopg import Connection
from psycopg.conninfo import make_conninfo

from dataplane.runtime.masked import mask
from ops.client.home import EmbeddedError
from ops.local.wheels import postgres_binary

_VERSION_TIMEOUT_S = 10.0
_NOT_PASSED_ON = (
    "host",
    "hostaddr",
    "port",
    "options",
    "target_session_attrs",
    "load_balance_hosts",
    "application_name",
)


class BackupError(Exception):
    """A backup or a restore cannot be made; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its major version."""

    path: Path
    major: int


def choose_program(name: str, found: list[Program], *, least: int) -> Path:
    """The oldest that is not older than `least`: a newer one may write what the server does not understand.

    Raises:
        BackupError: there is none.
    """
    fitting = [each for each in found if each.major >= least]
    if fitting:
        return min(fitting, key=lambda each: each.major).path
    have = ", ".join(f"{each.path} is of PostgreSQL {each.major}" for each in found) or f"there is no {name}"
    raise BackupError(
        f"{name} of PostgreSQL {least} or newer is needed, and {have}: install postgresql-client-{least} and put it on"
        " PATH, or install tidepool[embedded]"
    )


def find_programs(name: str) -> list[Program]:
    """All that can be run here."""
    return [Program(path=path, major=major) for path in _candidates(name) if (major := _major(path)) is not None]


def _candidates(name: str) -> Iterator[Path]:
    if (on_path := shutil.which(name)) is not None:
        yield Path(on_path)
    try:
        embedded = postgres_binary(name)
    except EmbeddedError:
        return
    if embedded.exists():
        yield embedded


def _major(path: Path) -> int | None:
    """The major version of a program; None: it cannot be run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\) (\d+)", done.stdout)
    return None if found is None else int(found[1])


def server_of(connection: Connection) -> tuple[str, Mapping[str, str]]:
    """Libpq's address of the very server that a connection reached, and the environment with its password, which is
    nothing for a command line that others can read.
    """
    info = connection.info
    given = {name: value for name, value in info.get_parameters().items() if name not in _NOT_PASSED_ON}
    address = make_conninfo("", **given, host=info.host, port=info.port, application_name="tidepool-backup")
    return address, {"PGPASSWORD": info.password} if info.password else {}


def run_program(argv: Sequence[str | Path], secrets: Mapping[str, str]) -> None:
    """Run a program to its end.

    Raises:
        BackupError: it failed; the message has its last words.
    """
    done = subprocess.run(argv, env=dict(os.environ) | dict(secrets), capture_output=True, text=True, check=False)
    if done.returncode:
        last = "; ".join(done.stderr.strip().splitlines()[-3:])
        raise BackupError(f"{Path(argv[0]).name} failed: {mask(last) or f'exit status {done.returncode}'}")
