"""`logs`: the logs of a stack on this machine."""

import os
from collections import deque
from pathlib import Path
from time import sleep
from typing import Annotated

import typer

from ops.cli.examples import examples
from ops.client.api import CommandError

POLL_S = 0.3
_TAIL_BYTES = 4 << 20


@examples("tidepool logs worker", "tidepool logs agent --follow -n 0")
def show_logs(
    process: Annotated[
        str | None, typer.Argument(help="A process, or how its name begins: api, worker, agent. Default: all.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="The last lines of each.")] = 50,
    home: Annotated[Path, typer.Option(envvar="TIDEPOOL_HOME", help="Folder of the stack.", file_okay=False)] = Path(
        "~/.tidepool"
    ),
) -> None:
    """Show the logs of `tidepool up` on this machine. Processes that were started one by one log to standard error."""
    folder = home.expanduser() / "logs"
    files = _files(folder, process)
    if not files:
        raise CommandError(_no_logs_text(folder, process))
    width = max(len(file.stem) for file in files) if len(files) > 1 else 0
    read: dict[Path, tuple[int, int]] = {}
    for file in files:
        with file.open("rb") as source:
            status = os.fstat(source.fileno())
            source.seek(max(0, status.st_size - _TAIL_BYTES))
            for line in deque(source, maxlen=lines):
                _print_line(file, line, width)
            read[file] = status.st_ino, source.tell()
    if follow:
        _follow(folder, process, width, read)


def _files(folder: Path, process: str | None) -> list[Path]:
    """Logs in the order of their names: of the process of that name, else of those whose names begin so."""
    files = sorted(folder.glob("*.log"))
    exact = [file for file in files if file.stem == process]
    return exact or [file for file in files if process is None or file.stem.startswith(process)]


def _no_logs_text(folder: Path, process: str | None) -> str:
    names = ", ".join(file.stem for file in _files(folder, None))
    if names:
        return f"no process '{process}' logs in {folder}; those are {names}"
    return (
        f"no logs in {folder} (TIDEPOOL_HOME): `tidepool up` writes there. Processes that were started one by one log"
        " to standard error, which their service manager keeps: `journalctl -u UNIT`, `docker logs`, `kubectl logs`"
    )


def _print_line(file: Path, line: bytes, width: int) -> None:
    prefix = f"{file.stem:{width}} | " if width else ""
    typer.echo(f"{prefix}{line.decode(errors='replace').rstrip()}")


def _follow(folder: Path, process: str | None, width: int, read: dict[Path, tuple[int, int]]) -> None:
    """Print new lines, also of new and rotated files. `read`: inode and bytes shown, by file."""
    try:
        while True:
            for file in _files(folder, process):
                read[file] = _show_new(file, read.get(file, (0, 0)), width)
            sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _show_new(file: Path, read: tuple[int, int], width: int) -> tuple[int, int]:
    """Print the complete lines after `read`; returns the new position."""
    with file.open("rb") as source:
        status = os.fstat(source.fileno())
        inode, offset = read
        offset = offset if inode == status.st_ino and offset <= status.st_size else 0
        source.seek(offset)
        whole, newline, _ = source.read().rpartition(b"\n")
    for line in whole.split(b"\n") if newline else ():
        _print_line(file, line, width)
    return status.st_ino, offset + len(whole) + len(newline)
