"""Replaces each process of a stack under load by the next release's, one after the other, and then back."""

import asyncio
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from alembic.script import ScriptDirectory

import migrations
from ops.client.api import CommandError
from ops.faults import released
from ops.faults.injector import FaultSource, InjectedFault
from ops.faults.load import Streamed
from ops.faults.losses import kind_of_process
from ops.faults.stack import SERVERS, FaultStack
from ops.local.waiting import wait_until

PREVIOUS_COMMIT = "fcd9aa34f29e5a8950e77f2476c4e2b47595445a"
"""The release before this one: both run side by side while an installation is upgraded."""
ROOT = Path(__file__).parents[2]
ORDER = ("api", "dispatcher", "worker", "forecaster", "beat", "agent")
"""In which processes are replaced; back again, the other way round."""
REPLACE_TIMEOUT_S = 180.0


class NoReleaseError(CommandError):
    """The previous release cannot be had here."""


def unpack_release(folder: Path, commit: str = PREVIOUS_COMMIT) -> Path:
    """Write the source tree of a commit to a folder.

    Raises:
        NoReleaseError: this is no git checkout, or its history does not reach so far back.
    """
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoReleaseError(
            f"the previous release, commit {commit[:12]}, is not in this checkout's history"
        ) from error
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def schema_of(tree: Path) -> str:
    """The newest revision of a release's schema."""
    head = ScriptDirectory(str(tree / "migrations")).get_current_head()
    assert head is not None
    return head


class Releases:
    """Which release each process of a stack is started from: a file for each, read at its start."""

    def __init__(self, folder: Path, names: Sequence[str], tree: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        for name in names:
            self.choose(name, tree)

    def choose(self, name: str, tree: Path) -> None:
        """From which tree the process is started next."""
        (self._folder / name).write_text(str(tree))

    def programs(self) -> Mapping[str, tuple[str, ...]]:
        """What Python runs for each process."""
        return {file.name: (released.__file__, str(file)) for file in self._folder.iterdir()}


class Upgrade(FaultSource):
    """Migrates the database, replaces every process by this release's, and then by the previous one's again. Each
    process that is away is a fault.
    """

    def __init__(self, stack: FaultStack, releases: Releases, previous: Path, notify: Callable[[str], None]) -> None:
        super().__init__()
        self._stack = stack
        self._releases = releases
        self._previous = previous
        self._notify = notify

    async def run(self, every_s: float, _until: asyncio.Event) -> None:
        """Replace a process every `every_s`, and all of them before this returns."""
        self._started_s = time.monotonic()
        await asyncio.to_thread(migrations.upgrade, self._stack.local.database_url)
        self._notify(f"migrated to {migrations.revisions()[0]} while all processes are the previous release's")
        names = sorted(self._processes(), key=lambda name: ORDER.index(kind_of_process(name)))
        for what, tree, each in (("upgrade", ROOT, names), ("roll back", self._previous, names[::-1])):
            for name in each:
                await self._replace(what, name, tree)
                await asyncio.sleep(every_s)

    def _processes(self) -> list[str]:
        return [name for name in self._stack.local.supervisor.pids() if name not in SERVERS]

    async def _replace(self, what: str, name: str, tree: Path) -> None:
        """SIGTERM, as at a planned restart, and wait for the other release's process (on Linux), after an agent until
        every endpoint has its instances again: the next one may be all that a model has besides.
        """
        supervisor = self._stack.local.supervisor
        began_s, pid = time.monotonic(), supervisor.pids()[name]
        self._releases.choose(name, tree)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

        async def is_another() -> bool:
            return supervisor.pids().get(name, pid) != pid

        if not await wait_until(is_another, REPLACE_TIMEOUT_S):
            raise TimeoutError(f"{name} has not ended {REPLACE_TIMEOUT_S:g} s after SIGTERM")
        await asyncio.to_thread(supervisor.wait_ready, REPLACE_TIMEOUT_S)
        if (runs := await asyncio.to_thread(Path(f"/proc/{supervisor.pids()[name]}/cwd").readlink)) != tree:
            raise RuntimeError(f"{name} should run in {tree}, and runs in {runs}")
        if kind_of_process(name) == "agent":
            await self._stack.wait_ready()
        lasted_s = time.monotonic() - began_s
        self.made.append(
            InjectedFault(kind=what, victim=name, at_s=round(began_s - self._started_s, 1), lasted_s=round(lasted_s, 1))
        )


def seamless_findings(streams: Sequence[Streamed], uploads_failed: Sequence[str]) -> list[str]:
    """A planned replacement breaks no stream, and no gateway that takes requests answers with a 5xx."""
    found = [
        f"{stream.tier} stream of {stream.model} prompt {stream.prompt} is {stream.outcome}: {stream.reason}"
        for stream in streams
        if stream.outcome != "whole" or stream.reason.startswith("5")
    ]
    return found + [f"a batch was not taken: {one}" for one in uploads_failed]
