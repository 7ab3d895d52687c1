"""What comes for the reader of an answer."""

import asyncio

from dataplane.dispatch.requests import Outputs
from dataplane.engines.interface import EngineOutput


def output(token_id: int) -> EngineOutput:
    return EngineOutput(request_id="r", token_ids=(token_id,))


def test_what_comes_is_read_in_order_by_who_waits_or_comes_later() -> None:
    async def read() -> list[object]:
        outputs = Outputs()
        waiting = asyncio.create_task(outputs.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        for token_id in (1, 2, 3):
            outputs.put(output(token_id))
        return [await waiting, await outputs.get(), *outputs.take(), *outputs.take()]

    assert asyncio.run(read()) == [output(1), output(2), output(3)]


def test_a_reader_who_leaves_takes_nothing_with_him() -> None:
    async def read() -> object:
        outputs = Outputs()
        leaving = asyncio.create_task(outputs.get())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        outputs.put(output(1))
        return await outputs.get()

    assert asyncio.run(read()) == output(1)


def test_a_reader_who_leaves_just_when_something_comes_leaves_it_to_the_next() -> None:
    async def read() -> object:
        outputs = Outputs()
        leaving = asyncio.create_task(outputs.get())
        await asyncio.sleep(0)
        outputs.put(output(1))
        leaving.cancel()
        await asyncio.wait([leaving])
        return await outputs.get()

    assert asyncio.run(read()) == output(1)
