"""How the errors of an engine reach the client."""

import pytest
from prometheus_client import CollectorRegistry

from dataplane.agent.answers import Answer
from dataplane.agent.detokenization import IncrementalDetokenizer
from dataplane.agent.measures import RequestMeasure, RequestMeasures
from dataplane.agent.parsing.answer_text import AnswerText
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.protocol.messages import Failed
from tests.dataplane.agent.test_detokenization import ByteTokenizer
from tests.event_loop import asynchronous


@pytest.mark.parametrize(("invalid", "status", "retryable"), [(True, 400, False), (False, 500, True)])
@asynchronous
async def test_only_an_error_of_the_engine_itself_is_tried_elsewhere(
    invalid: bool, status: int, retryable: bool
) -> None:
    request = EngineRequest(request_id="r", instance_id="i", tier="IW-N", prompt=(1,), max_tokens=9)
    inflight = InflightRequest(request=request, model="m", arrived_s=0.0)
    inflight.outputs.put(EngineOutput(request_id="r", error="no", invalid=invalid))
    measure = RequestMeasure(RequestMeasures(CollectorRegistry()), "m", 1, lambda: 0.0)
    text = AnswerText(IncrementalDetokenizer(ByteTokenizer(), ()))
    *_, failed = [event async for event in Answer(inflight, text, cancel=lambda _: None, measure=measure).events()]
    assert isinstance(failed, Failed)
    assert (failed.status, failed.retryable, failed.message) == (status, retryable, "no")
