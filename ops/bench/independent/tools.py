"""The programs of other projects, each in an environment of its own, and what both have in common."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.independent.counts import Counts

TOOLS = Path(__file__).parents[3] / ".clients"
"""Where `make` installs them."""
LOG = "output.log"
_LOG_LINES = 30


class ToolError(Exception):
    """A load generator that is not installed, failed, or wrote what cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An OpenAI server, a key of a client, its model, and the folder of the model's tokenizer."""

    url: str
    key: str
    model: str
    tokenizer: Path


@dataclass(frozen=True, kw_only=True)
class Load:
    """Prompts and answers of so many tokens, unless a trace says their lengths, and a seed."""

    input_tokens: int = 200
    output_tokens: int = 32
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One of the runs that a load generator made, what it saw, and what it found wrong. `began_s` is Unix time;
    `unreported`: requests that it sent and says nothing of.
    """

    name: str
    began_s: float
    seen: Counts
    saturated: bool = False
    unreported: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A load generator: the name of its program, what its environment needs, its arguments (of a target, a load, more
    options and the folder it writes to), and what it wrote there.
    """

    name: str
    environment: Mapping[str, str]
    arguments: Callable[[Target, Load, Sequence[str], Path], list[str]]
    read: Callable[[Path], list[Phase]]


def executable(tools: Path, name: str) -> Path:
    """A tool's program.

    Raises:
        ToolError: it is not installed.
    """
    found = tools / name / "bin" / name
    if not found.is_file():
        raise ToolError(f"{name} is not installed in {tools / name}: `make bench-independent` installs it")
    return found


def emptied(folder: Path) -> Path:
    """A folder with nothing in it, whatever an earlier run left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


async def run_tool(
    program: Path, arguments: Sequence[str], folder: Path, *, timeout_s: float, environment: Mapping[str, str]
) -> None:
    """Run a program to its end in an empty folder, which becomes its home. What it prints is kept in `output.log`. Its
    temporary files are elsewhere, since paths of sockets must be short.

    Raises:
        ToolError: it failed, or did not end in time; the message has its last lines.
    """
    log = folder / LOG
    known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    with log.open("wb") as output, tempfile.TemporaryDirectory(prefix="tidepool-", ignore_cleanup_errors=True) as short:
        process = await asyncio.create_subprocess_exec(
            program, *arguments,
            cwd=folder, env={"HOME": str(folder), "TMPDIR": short} | known | dict(environment),
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            status = await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            raise ToolError(f"{program.name} had not ended after {timeout_s:g} s\n{_tail(log)}") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if status:
        raise ToolError(f"{program.name} ended with status {status}\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
