"""When the dispatcher's loops run: after a pause, or as soon as they are woken."""

import asyncio
import contextlib
import math
from collections.abc import Callable

_STEP_S = 0.25


class Pauses:
    """An interval of `least_s` seconds while requests wait, of `most_s` after a poll that found none. `wake` ends a
    pause, but not before `gap_s`, so that what ends together is followed by one poll.
    """

    def __init__(self, *, gap_s: float = 0.0, least_s: float, most_s: float) -> None:
        self._gap_s = gap_s
        self._least_s = least_s
        self._most_s = most_s
        self._woken = asyncio.Event()
        self.next_s = least_s

    def note(self, *, found: bool) -> None:
        """Record whether a poll found waiting requests."""
        self.next_s = self._least_s if found else max(self._least_s, self._most_s)

    def wake(self) -> None:
        """Poll again now."""
        self.next_s = self._least_s
        self._woken.set()

    async def rest(self) -> None:
        """Wait until the next poll."""
        await asyncio.sleep(self._gap_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.next_s):
                await self._woken.wait()
        self._woken.clear()


class Alarm:
    """Calls `ring` at the times that are set, up to a quarter of a second late, so that many times are few calls."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._set: dict[int, asyncio.TimerHandle] = {}

    def ring_in(self, delay_s: float) -> None:
        """Call after `delay_s` seconds; now, if that is not positive."""
        if delay_s <= 0:
            self._ring()
            return
        loop = asyncio.get_running_loop()
        step = math.ceil((loop.time() + delay_s) / _STEP_S)
        if step not in self._set:
            self._set[step] = loop.call_at(step * _STEP_S, self._ring_at, step)

    def _ring_at(self, step: int) -> None:
        del self._set[step]
        self._ring()
