"""Pauses between looks into the queue."""

import asyncio

from controlplane.dispatcher.pauses import Pauses
from tests.controlplane.world import HANGS_S, PATIENCE_S


def test_they_become_longer_while_nothing_waits_and_short_when_something_does() -> None:
    pauses = Pauses(least_s=0.25, most_s=1.5)
    seen = []
    for found in (True, False, False, False, False, True, False):
        pauses.note(found=found)
        seen.append(pauses.next_s)
    assert seen == [0.25, 0.5, 1.0, 1.5, 1.5, 0.25, 0.5]
    pauses.wake()
    assert pauses.next_s == 0.25


def test_a_pause_that_is_woken_ends_and_the_next_one_does_not() -> None:
    async def run() -> None:
        pauses = Pauses(least_s=HANGS_S, most_s=HANGS_S)
        pauses.wake()  # before it began
        async with asyncio.timeout(PATIENCE_S):
            await pauses.rest()
        resting = asyncio.create_task(pauses.rest())
        await asyncio.sleep(0)
        assert not resting.done()
        pauses.wake()
        async with asyncio.timeout(PATIENCE_S):
            await resting

    asyncio.run(run())
