"""Sampling parameters on a node: their limits, and log probabilities in the stream."""

from typing import Any

import pytest
from msgspec.structs import asdict

from dataplane.agent.answers import engine_request
from dataplane.agent.sampling import check_sampling
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Finished, Sampling, Token
from tests.dataplane.replay_node import generate, instance, model, running_node
from tests.dataplane.streams import read, token_ids
from tests.event_loop import asynchronous


@pytest.mark.parametrize(
    ("field", "good", "bad", "limits"),
    [
        ("temperature", (0.0, 2.0), (-0.1, 2.1, float("nan")), "0 to 2"),
        ("top_p", (0.1, 1.0), (0.0, 1.1), "over 0 and at most 1"),
        ("top_k", (0, 1, 10**6), (-1, 2**64), "0, which is no limit, to 2147483647"),
        ("seed", (None, -1, 2**63 - 1), (-(2**64), 2**63 + 2**40), "-9.22337e.18 to 9.22337e.18"),
        ("min_p", (0.0, 1.0), (-0.1, 1.1), "0 to 1"),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1), "-2 to 2"),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1), "-2 to 2"),
        ("repetition_penalty", (0.01, 1.3, 100.0), (0.0, -1.0, 101.0), "0.01 to 100"),
        ("logprobs", (None, 0, 20), (-1, 21), "0 to 20"),
        ("min_tokens", (0, 9), (-1, 10), "at (least 0|most max_tokens, 9)"),
        ("max_tokens", (None, 1), (0,), "at least 1"),
        ("logit_bias", ((), ((1, -100.0), (2, 100.0)), ((1, 0.0),) * 1024), (((7, 101.0),),), "token 7 must be -100"),
        ("logit_bias", (), (((7, 0.0),) * 1025,), "1024 is the limit"),
        ("stop", (("a",) * 4,), (("a",) * 5,), "4 is the limit"),
    ],
)
def test_every_parameter_has_limits_that_its_refusal_names(
    field: str, good: tuple[Any, ...], bad: tuple[Any, ...], limits: str
) -> None:
    for value in good:
        check_sampling(generate(sampling=Sampling(**{"max_tokens": 9, field: value})), stop_strings_max=4)
    for value in bad:
        with pytest.raises(BadRequestError, match=limits) as refused:
            check_sampling(generate(sampling=Sampling(**{"max_tokens": 9, field: value})), stop_strings_max=4)
        assert refused.value.param == field


def test_the_engine_gets_every_parameter() -> None:
    asked = Sampling(
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=4,
        ignore_eos=True,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((3, 4.0),),
        logprobs=2,
    )
    request = engine_request(generate(sampling=asked), (1, 2), model(), tokens_max=100)
    assert {**asdict(asked), "stop": ()} == {name: getattr(request, name, ()) for name in asdict(asked)}


@asynchronous
async def test_an_answer_that_may_not_end_before_any_number_of_tokens_ends_with_its_context() -> None:
    """No frame to a worker could hold such a number."""
    async with running_node() as node:
        await node.hold(1, instance())
        events = await read(node, generate(sampling=Sampling(min_tokens=2**64)))
        assert isinstance(events[-1], Finished)
        assert (events[-1].finish_reason, node.in_flight()) == ("length", 0)


@asynchronous
async def test_a_stream_has_the_log_probabilities_of_its_tokens_also_where_it_continues() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        asked = Sampling(max_tokens=12, temperature=0.0, logprobs=4)
        events = [event for event in await read(node, generate(sampling=asked)) if isinstance(event, Token)]
        scores = [one for event in events for one in event.logprobs]
        assert [one.token.token_id for one in scores] == token_ids(events)
        assert "".join(one.token.text for one in scores).strip() == "".join(event.text for event in events)
        for one in scores:
            assert bytes(one.token.utf8).decode() == one.token.text
            assert one.token == one.top[0]
            values = [top.logprob for top in one.top]
            assert values == sorted(values, reverse=True)
            assert (len({top.token_id for top in one.top}), max(values) <= 0) == (4, True)
        rest = await read(node, generate("r2", sampling=asked, generated=tuple(token_ids(events)[:5])))
        assert [one for event in rest if isinstance(event, Token) for one in event.logprobs] == scores[5:]
        plain = await read(node, generate("r3"))
        assert not any(event.logprobs for event in plain if isinstance(event, Token))


@asynchronous
async def test_tokens_after_a_stop_string_have_no_log_probabilities() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        whole = await read(node, generate())
        words = "".join(event.text for event in whole if isinstance(event, Token)).split()
        asked = Sampling(max_tokens=20, temperature=0.0, logprobs=0, stop=(words[5],))
        stopped = [event for event in await read(node, generate("r2", sampling=asked)) if isinstance(event, Token)]
        assert len(token_ids(stopped)) < 20
        assert sum(len(event.logprobs) for event in stopped) == len(token_ids(stopped))
