"""A TCP proxy between two processes that can delay or hold bytes, or reset connections.

    caller -> Link (port) -> called (its own port)

Bytes are never changed or reordered; a healed link resumes where it stopped, as TCP does after lost packets.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

from ops.local.ports import LOOPBACK, free_port

CHUNK_BYTES = 64 * 1024


class Fault(StrEnum):
    """A fault of a link. A black hole holds all bytes; a reset aborts every connection, old and new."""

    LATENCY = "latency"
    RESET = "reset"
    BLACK_HOLE = "black_hole"


class Link:
    """A link from a caller to a called process, for one event loop. `others`: ports of replicas that are tried while
    the called process does not listen, as behind a load balancer. `spares`: whether faults leave a caller alone, by the
    port that it calls from.
    """

    def __init__(self, caller: str, called: str, port: int) -> None:
        self.caller = caller
        self.called = called
        self.port = free_port()
        self.target_port = port
        self.others: tuple[int, ...] = ()
        self.spares: Callable[[int], bool] = lambda _port: False
        self._fault: Fault | None = None
        self._delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def name(self) -> str:
        """Caller and called process."""
        return f"{self.caller}>{self.called}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, self.port, backlog=512)

    async def stop(self) -> None:
        """End all connections and stop listening."""
        self.heal()
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close at the loop's next turn

    def fail(self, fault: Fault, *, delay_s: float = 0.0) -> None:
        """Inject a fault until `heal`. `delay_s` is the latency of each chunk of bytes, in each direction."""
        self._fault, self._delay_s = fault, delay_s
        if fault == Fault.BLACK_HOLE:
            self._open.clear()
        if fault == Fault.RESET:
            for writer in self._writers:
                writer.transport.abort()

    def heal(self) -> None:
        """End the fault; bytes that a black hole held are sent."""
        self._fault, self._delay_s = None, 0.0
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with self._kept(writer):
                await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the connection is aborted
        finally:
            self._connections.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to the called process and copy bytes in both directions until one of them ends."""
        caller: int = writer.get_extra_info("peername")[1]
        if self._fault == Fault.RESET and not self.spares(caller):
            raise ConnectionResetError
        await self._pass(caller)
        far_reader, far_writer = await self._reach()
        async with self._kept(far_writer):
            directions = [
                asyncio.create_task(self._copy(reader, far_writer, caller)),
                asyncio.create_task(self._copy(far_reader, writer, caller)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the called process, or to a replica."""
        for port in (self.target_port, *self.others):
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection(LOOPBACK, port)
        raise ConnectionRefusedError

    async def _pass(self, caller: int) -> None:
        """Wait until bytes of that caller may go on."""
        if not self._open.is_set() and not self.spares(caller):
            await self._open.wait()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: int) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._pass(caller)
            writer.write(data)
            await writer.drain()

    @contextlib.asynccontextmanager
    async def _kept(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Register a connection for `fail`; at the end it is flushed and closed."""
        self._writers.add(writer)
        try:
            yield
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
