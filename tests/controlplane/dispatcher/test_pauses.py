"""Pauses between looks into the queue."""

import asyncio

from controlplane.dispatcher.pauses import Alarm, Pauses
from tests.controlplane.world import HANGS_S, PATIENCE_S


def test_they_are_long_while_nothing_waits_and_short_when_something_does() -> None:
    pauses = Pauses(least_s=0.25, most_s=1.5)
    seen = []
    for found in (True, False, False, True, False):
        pauses.note(found=found)
        seen.append(pauses.next_s)
    assert seen == [0.25, 1.5, 1.5, 0.25, 1.5]
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


def test_what_is_woken_often_is_polled_once_a_gap() -> None:
    async def run() -> None:
        pauses = Pauses(gap_s=0.05, least_s=HANGS_S, most_s=HANGS_S)
        began_s = asyncio.get_running_loop().time()
        for _ in range(2):
            pauses.wake()
            async with asyncio.timeout(PATIENCE_S):
                await pauses.rest()
        assert asyncio.get_running_loop().time() - began_s >= 0.1

    asyncio.run(run())


def test_an_alarm_rings_once_at_each_time_that_is_set() -> None:
    async def run() -> None:
        clock = asyncio.get_running_loop().time
        began_s, rung = clock(), asyncio.Queue[float]()
        alarm = Alarm(lambda: rung.put_nowait(clock() - began_s))
        for delay_s in (0.6, *[0.1] * 100, 0.0):
            alarm.ring_in(delay_s)
        times = [0.0]
        async with asyncio.timeout(PATIENCE_S):
            while times[-1] < 0.6:
                times.append(await rung.get())
        assert rung.empty()
        now, *soon, _last = times[1:]
        assert now <= min(soon)
        assert all(each >= 0.1 for each in soon)
        assert len(soon) in {1, 2}, "the hundred calls may have been on both sides of a quarter of a second"

    asyncio.run(run())
