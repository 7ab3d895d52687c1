"""Tests as coroutines, and waiting in them."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


PATIENCE_S = 240.0
"""How long anything may take: a worker that starts again needs minutes where the machine is busy."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that depends on another task, thread or process."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
