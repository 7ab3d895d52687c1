"""Child processes of the agent, each with one end of a socket pair."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Self

_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


class ChildProcess:
    """A running process, and the agent's end of the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer

    @classmethod
    async def start(
        cls, module: str, *arguments: str, environment: Mapping[str, str] | None = None, buffer_bytes: int = 2**16
    ) -> Self:
        """Start `python -m module DESCRIPTOR arguments` in a process group of its own: Ctrl-C reaches only the agent.
        `environment` None: what Python needs of the agent's, without its secrets, for processes that work on what
        others wrote. `buffer_bytes`: of the reader.

        Raises:
            OSError: the machine has no process, descriptor or memory for one.
        """
        if environment is None:
            environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = _opened(module, theirs.fileno(), arguments, environment)
            undo.callback(process.wait)
            undo.callback(process.kill)
            reader, writer = await asyncio.open_connection(sock=ours, limit=buffer_bytes)
            undo.pop_all()
        return cls(process, reader, writer)

    async def kill(self) -> None:
        """End the process at once, and wait for its end, also where the wait for its socket is cancelled."""
        self.process.kill()
        self.writer.close()
        try:
            with contextlib.suppress(ConnectionError):
                await self.writer.wait_closed()
        finally:
            await asyncio.to_thread(self.process.wait)


def _opened(
    module: str, descriptor: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, str(descriptor), *arguments],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,
    )
