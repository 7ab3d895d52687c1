"""Responses in the background: they outlive their client, and are retrieved. A gateway runs those that it was asked
for; if it dies, they have failed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from controlplane.errors import BusyError
from controlplane.serving.background import in_background
from controlplane.serving.stored_responses import StoredResponses

_LOOK_EVERY_S = 1.0
"""Interval at which a gateway writes that its responses are in progress, and looks which were cancelled."""


class BackgroundResponses:
    """The responses that one gateway runs in the background."""

    def __init__(self, responses: StoredResponses, *, count_max: int) -> None:
        self._responses = responses
        self._count_max = count_max
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Hold the place of one more while the block stores and starts it.

        Raises:
            BusyError: the gateway runs as many as it may.
        """
        if len(self._tasks) + self._starting >= self._count_max:
            raise BusyError(f"this gateway runs {self._count_max} responses in the background; try again later")
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def start(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a stored response to its end. It is cancelled when the response is cancelled or deleted, and when the
        gateway stops.
        """
        task = asyncio.create_task(work)
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the responses while the block runs; those that still run when it is left are cancelled."""
        try:
            async with in_background(self._watch()):
                yield
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            asked = list(self._tasks)
            wanted = await self._responses.note_running(asked)
            for response_id in asked:
                if response_id not in wanted and (task := self._tasks.get(response_id)) is not None:
                    task.cancel()
