"""The outputs of a request and their reader."""

import asyncio

import pytest

from dataplane.dispatch.requests import JOINED_TOKENS_MAX, Outputs
from dataplane.engines.interface import EngineOutput, TokenScore
from dataplane.protocol.errors import DataplaneError
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
    assert [await outputs.get(), *iter(outputs.pop, None)] == [output(2), output(3)]


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


def test_outputs_call_their_listener_once_for_all_that_wait_and_join_tokens() -> None:
    outputs, calls = Outputs(), []
    outputs.put(output(1))
    outputs.listen(lambda: calls.append(len(calls)))
    assert not calls, "what is there already is the listener's to pop"
    assert outputs.pop() == output(1)
    assert outputs.pop() is None
    outputs.put(EngineOutput(request_id="r", token_ids=(2,), cached_tokens=5))
    for token_id in (3, 4):
        outputs.put(output(token_id))
    outputs.put(EngineOutput(request_id="r", token_ids=(5,), finish_reason="length"))
    assert len(calls) == 1
    whole = EngineOutput(request_id="r", token_ids=(2, 3, 4, 5), cached_tokens=5, finish_reason="length")
    assert (outputs.pop(), outputs.pop()) == (whole, None)
    outputs.put(output(6))
    assert len(calls) == 2


def test_what_is_more_than_tokens_or_too_much_is_not_joined() -> None:
    score = TokenScore(logprob=-1.0)
    ends = [EngineOutput(request_id="r", error="no"), DataplaneError("no")]
    apart = [EngineOutput(request_id="r", token_ids=(1,), scores=(score,)), *ends]
    for one in apart:
        outputs = Outputs()
        outputs.listen(lambda: None)
        for each in (output(1), one, output(2)):
            outputs.put(each)
        assert list(iter(outputs.pop, None)) == [output(1), one, output(2)]
    outputs = Outputs()
    outputs.listen(lambda: None)
    for _ in range(2 * JOINED_TOKENS_MAX):
        outputs.put(output(1))
    joined = iter(outputs.pop, None)
    assert [len(one.token_ids) for one in joined if isinstance(one, EngineOutput)] == [JOINED_TOKENS_MAX] * 2
