"""Work that runs concurrently with a block: loops, and counts that are written to their store again and again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.errors import UnavailableError

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run an endless coroutine while the block runs; it is cancelled, and has ended, when the block is left. An error
    of its own is raised then.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def flushing(flush: Callable[[], None], every_s: float, what: str) -> AsyncIterator[None]:
    """Call `flush` in a thread every `every_s` seconds while the block runs, and once when it is left. While the store
    is unavailable, the log says so once, and `flush` keeps what it could not write.
    """
    threads = anyio.CapacityLimiter(1)
    unavailable = False

    async def flush_once() -> None:
        nonlocal unavailable
        try:
            await anyio.to_thread.run_sync(flush, limiter=threads)
        except (UnavailableError, SQLAlchemyError) as error:
            if not unavailable:
                log.warning("the store is unavailable", waiting=what, error=str(error).splitlines()[0])
            unavailable = True
        else:
            if unavailable:
                log.info("the store is available again", written=what)
            unavailable = False

    async def repeat() -> None:
        while True:
            await asyncio.sleep(every_s)
            await flush_once()

    try:
        async with in_background(repeat()):
            yield
    finally:
        await flush_once()
