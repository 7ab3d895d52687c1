"""Tests as coroutines."""

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
