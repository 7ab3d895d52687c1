"""The agent's end of one worker process: its start, commands, reports, and its end."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from typing import Self

import structlog

from dataplane.agent.child_process import ChildProcess
from dataplane.worker.frames import (
    FRAME_BYTES_MAX,
    LENGTH,
    Command,
    Configure,
    Report,
    body_length,
    decode_report,
    encode_frame,
)

log = structlog.get_logger()

UNREAD_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""A worker with more bytes of unread commands is killed. New requests are refused earlier, at `unread_bytes_max`."""
STOP_GRACE_S = 2.0
"""How long a worker may take to end after its socket was closed, before it is killed."""


class WorkerLink:
    """A running worker process and the socket to it."""

    def __init__(self, child: ChildProcess) -> None:
        self._process = child.process
        self._reader = child.reader
        self._writer = child.writer

    @classmethod
    async def start(
        cls, configure: Configure, environment: Mapping[str, str], module: str = "dataplane.worker.main"
    ) -> Self:
        """Start a worker process in an environment, and send its first command.

        Raises:
            OSError: the machine has no process, descriptor or memory for one.
        """
        link = cls(await ChildProcess.start(module, environment=environment))
        link.send(configure)
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unread_bytes(self) -> int:
        """Bytes of commands that are queued here, since the worker has not read those before them."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, command: Command) -> None:
        """Queue a command. Commands to a dead worker are lost; `reports` then ends. A worker that leaves more than
        `UNREAD_BYTES_MAX` unread is killed, so that the queue is bounded.
        """
        if self._writer.is_closing():
            return
        self._writer.write(encode_frame(command))
        if self.unread_bytes > UNREAD_BYTES_MAX:
            log.error("worker does not read its commands; ended", pid=self.pid, unread_bytes=self.unread_bytes)
            self.kill()

    def kill(self) -> None:
        """End the worker, whatever it is doing; `reports` then ends too."""
        self._process.kill()
        self._writer.transport.abort()

    def hang_up(self) -> None:
        """Close the socket, which ends the worker; `reports` then ends too."""
        self._writer.close()

    async def reports(self) -> AsyncIterator[Report]:
        """The worker's reports, until it is gone.

        Raises:
            FrameError: a report cannot be read.
        """
        while True:
            try:
                length = body_length(await self._reader.readexactly(LENGTH.size))
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield decode_report(body)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Close the socket, which ends the worker, and wait; kill it after `grace_s`. Its exit status."""
        self._writer.close()
        try:
            return await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)
