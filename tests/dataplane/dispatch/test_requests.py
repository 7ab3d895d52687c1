"""The outputs of a request and their reader."""

import asyncio

import pytest

from dataplane.dispatch.requests import Outputs
from dataplane.engines.interface import EngineOutput
from tests.event_loop import asynchronous


def output(token_id: int) -> EngineOutput:
    return EngineOutput(request_id="r", token_ids=(token_id,))


@asynchronous
async def test_outputs_are_read_in_order_by_a_waiting_reader_or_later() -> None:
    outputs = Outputs()
    waiting = asyncio.create_task(outputs.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    for token_id in (1, 2, 3):
        outputs.put(output(token_id))
    assert await waiting == output(1)
    assert [await outputs.get(), *outputs.take(), *outputs.take()] == [output(2), output(3)]


@pytest.mark.parametrize("output_first", [True, False])
@asynchronous
async def test_a_cancelled_reader_takes_no_output(output_first: bool) -> None:
    outputs = Outputs()
    leaving = asyncio.create_task(outputs.get())
    await asyncio.sleep(0)
    if output_first:
        outputs.put(output(1))
    leaving.cancel()
    await asyncio.wait([leaving])
    if not output_first:
        outputs.put(output(1))
    assert await outputs.get() == output(1)
