"""One stream of server-sent events for many readers: what is sent is read and encoded once for all of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.errors import TidepoolError, UnavailableError

log = structlog.get_logger()
_BEAT = b": beat\n\n"
_BEAT_S = 10.0
"""So often at least something is sent, and a reader is asked whether it still may read."""
_CPU_SHARE = 0.008
"""Of a core, that a stream may take: of a large fleet, whose events are dear, they come more seldom."""
_PAUSE_MAX_S = 10.0


def pause_s(every_s: float, cpu_s: float) -> float:
    """How long to wait after an event whose making took `cpu_s` seconds of CPU."""
    return max(every_s, min(cpu_s / _CPU_SHARE, _PAUSE_MAX_S))


class LiveStream:
    """The latest event `name`, made every `every_s` seconds while somebody reads, or more seldom where making it takes
    much CPU; `read` gives its data, as JSON. A reader that is slow misses events and gets the latest one.
    """

    def __init__(self, read: Callable[[], Awaitable[bytes]], *, name: str, every_s: float) -> None:
        self._read = read
        self._name = name
        self._every_s = every_s
        self._readers = 0
        self._loop: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._latest = b""

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """The latest event, and then each new one; a comment where none comes for long."""
        with self._reading():
            while True:
                changed = self._changed
                if self._latest:
                    yield self._latest
                while not changed.is_set():
                    try:
                        async with asyncio.timeout(_BEAT_S):
                            await changed.wait()
                    except TimeoutError:
                        yield _BEAT

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self._readers += 1
        if self._loop is None:
            self._loop = asyncio.create_task(self._refresh())
        try:
            yield
        finally:
            self._readers -= 1
            if self._readers == 0 and self._loop is not None:
                self._loop.cancel()
                self._loop, self._latest = None, b""

    async def _refresh(self) -> None:
        while True:
            began_s = time.process_time()
            self._latest = await self._next()
            took_s = time.process_time() - began_s
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(pause_s(self._every_s, took_s))

    async def _next(self) -> bytes:
        try:
            return b"event: %s\ndata: %s\n\n" % (self._name.encode(), await self._read())
        except (UnavailableError, SQLAlchemyError) as error:
            log.info("the live view cannot be read", error=str(error).splitlines()[0])
            return b"event: away\ndata: {}\n\n"


async def events_of(stream: LiveStream, may_go_on: Callable[[], Awaitable[None]]) -> AsyncGenerator[bytes, None]:
    """What one reader is sent, until it may read no more: `may_go_on` raises then."""
    checked_s = asyncio.get_running_loop().time()
    async with contextlib.aclosing(stream.follow()) as events:
        async for event in events:
            now_s = asyncio.get_running_loop().time()
            if now_s - checked_s >= _BEAT_S:
                try:
                    await may_go_on()
                except TidepoolError:
                    return
                checked_s = now_s
            yield event
