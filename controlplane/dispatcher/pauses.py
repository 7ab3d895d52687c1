"""How long the release loop rests between two looks into the queue."""

import asyncio
import contextlib


class Pauses:
    """Of `least_s` seconds while something waits, twice as long after each look that found nothing, up to `most_s`.
    `wake` ends a pause: something waits now.
    """

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._woken = asyncio.Event()
        self.next_s = least_s

    def note(self, *, found: bool) -> None:
        """What a look found."""
        self.next_s = self._least_s if found else min(2 * self.next_s, max(self._least_s, self._most_s))

    def wake(self) -> None:
        """Look now, and often again."""
        self.next_s = self._least_s
        self._woken.set()

    async def rest(self) -> None:
        """Until the next look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.next_s):
                await self._woken.wait()
        self._woken.clear()
