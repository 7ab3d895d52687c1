"""Waiting for something to become true."""

import asyncio
import time
from collections.abc import Awaitable, Callable

LOOK_EVERY_S = 0.5


async def wait_until(true: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Look until it is true, for at most `timeout_s`; whether it became so."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if await true():
            return True
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(LOOK_EVERY_S)
