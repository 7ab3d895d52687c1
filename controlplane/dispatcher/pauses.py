"""The polling interval of the release loop."""

import asyncio
import contextlib


class Pauses:
    """An interval of `least_s` seconds while requests wait, doubled after each poll that found none, up to `most_s`.
    `wake` ends a pause at once.
    """

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._woken = asyncio.Event()
        self.next_s = least_s

    def note(self, *, found: bool) -> None:
        """Record whether a poll found waiting requests."""
        self.next_s = self._least_s if found else min(2 * self.next_s, max(self._least_s, self._most_s))

    def wake(self) -> None:
        self.next_s = self._least_s
        self._woken.set()

    async def rest(self) -> None:
        """Wait until the next poll."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.next_s):
                await self._woken.wait()
        self._woken.clear()
