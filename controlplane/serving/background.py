"""Work that goes on beside a block."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run work without end while the block runs; it is cancelled, and has ended, when the block is left. An error of
    its own is raised then.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def repeating(act: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Act every `every_s` seconds while the block runs, and once more when it is left."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(every_s)
            await act()

    try:
        async with in_background(repeat()):
            yield
    finally:
        await act()
