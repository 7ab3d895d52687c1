"""Several choices of one query: where they go, what they are counted as, and how they end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.errors import NodeError
from controlplane.policies.decisions import Route
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.fan_out import InFlightQuery, TokenUsage, send_query
from controlplane.serving.query import Query, seed_of
from controlplane.serving.send import Sender
from dataplane.protocol.messages import Finished, Generate, Sampling, Started, Token
from dataplane.protocol.records import RecordedEvent
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving.test_continuation import MODEL, Fleet, settings


class Nodes(AgentClient):
    """Nodes that answer each choice with its seed. `gates`: those after whose choice of that number nothing comes until
    it is opened; `fails`: the number of the choice that a node refuses for good.
    """

    def __init__(self, *, gated: frozenset[int] = frozenset(), fails: int | None = None) -> None:
        super().__init__(settings())
        self.asked: list[Generate] = []
        self.cancelled: list[int] = []
        self.gated = gated
        self.gate = asyncio.Event()
        self.fails = fails

    async def generate(
        self, url: str, request: Generate, *_: Any, **__: Any
    ) -> AsyncGenerator[list[RecordedEvent], None]:
        number = _number(request)
        self.asked.append(request)
        ended = False
        try:
            yield [Started(prompt_tokens=10)]
            if number == self.fails:
                raise NodeError("no", status=400, code="invalid_value", retryable=False)
            if number in self.gated:
                await self.gate.wait()
            yield [Token(text=f"{number}", token_ids=(number,)), Token(text="!", token_ids=(99,))]
            yield [Finished(finish_reason="stop", prompt_tokens=10, completion_tokens=2, cached_tokens=number)]
            ended = True
        finally:
            if not ended:
                self.cancelled.append(number)


class Crowded(Fleet):
    """A fleet whose first node has more to do with each request that it gets."""

    def instances(self, model: str | None = None) -> Any:
        first, second = super().instances(model)
        of_first, of_second = self.context_tokens
        first = replace(first, remaining_tokens=2000 * self.sent, context_tokens=of_first)
        return first, replace(second, context_tokens=of_second)

    context_tokens: tuple[int | None, int | None] = None, None
    sent = 0

    def note_sent(self, instance_id: str, tokens: int, input_tokens: int = 0) -> Any:
        self.sent += 1
        return super().note_sent(instance_id, tokens, input_tokens)


def _number(message: Generate) -> int:
    """The number of a choice, from the id of its attempt."""
    parts = message.request_id.split(".")
    return int(parts[1]) if len(parts) == 3 else 0


def query_of(prompts: int = 1, *, n: int = 1, best_of: int | None = None, seed: int | None = None) -> Query:
    message = Generate(
        request_id="",
        instance_id="",
        model="tide",
        tier=Tier.IW_N,
        prompt="x",
        sampling=Sampling(seed=seed, max_tokens=5),
    )
    return Query(prompts=(message,) * prompts, n=n, best_of=best_of or n)


def in_flight(query: Query, fleet: Fleet) -> InFlightQuery:
    return InFlightQuery.of(fleet, MODEL, query, query.choices("r"), tenant="acme", origin=None)


def run(nodes: Callable[[], Nodes], query: Query, work: Callable[[Nodes, InFlightQuery, Any], Any]) -> Any:
    async def all_of_it() -> Any:
        made, fleet = nodes(), Crowded()
        flying = in_flight(query, fleet)
        try:
            async with asyncio.timeout(60), aclosing(send_query(Sender(fleet, made, settings()), flying)) as stream:
                return await work(made, flying, stream)
        finally:
            await made.close()

    return asyncio.run(all_of_it())


async def whole(nodes: Nodes, flying: InFlightQuery, stream: Any) -> Any:
    texts = [""] * len(flying.choices)
    async for choice, events in stream:
        texts[choice] += "".join(event.text for event in events if isinstance(event, Token))
    return nodes, flying, texts


def test_each_choice_is_a_request_with_a_seed_of_its_own() -> None:
    nodes, flying, texts = run(Nodes, query_of(n=3, seed=7), whole)
    assert texts == ["0!", "1!", "2!"]
    seeds = {_number(asked): asked.sampling.seed for asked in nodes.asked}
    assert seeds == {0: 7, 1: seed_of(7, 1), 2: seed_of(7, 2)}
    assert len(set(seeds.values())) == 3
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert flying.output_tokens == 6


def test_a_choice_of_any_prompt_has_the_seed_that_it_would_have_alone() -> None:
    together = [message.sampling.seed for message in query_of(2, n=2, seed=7).choices("r")]
    assert together == [7, seed_of(7, 1)] * 2


def test_without_a_seed_each_choice_gets_another() -> None:
    nodes, _, _ = run(Nodes, query_of(n=4), whole)
    assert len({asked.sampling.seed for asked in nodes.asked}) == 4


def test_names_and_fences_are_those_of_the_query_and_a_number() -> None:
    messages = query_of(2, n=2).choices("r", fence="batch/1", epoch=3)
    assert [message.request_id for message in messages] == ["r", "r.1", "r.2", "r.3"]
    assert [message.fence for message in messages] == ["batch/1", "batch/1.1", "batch/1.2", "batch/1.3"]
    assert {message.epoch for message in messages} == {3}


def test_siblings_follow_the_first_token_to_its_instance() -> None:
    async def held(nodes: Nodes, flying: InFlightQuery, stream: Any) -> Any:
        assert await anext(stream) == (0, [Started(prompt_tokens=10)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(nodes.asked) == 1, "nobody else has the prompt yet"
        nodes.gate.set()
        return await whole(nodes, flying, stream)

    nodes, _, texts = run(lambda: Nodes(gated=frozenset({0})), query_of(n=3), held)
    assert texts == ["0!", "1!", "2!"]
    assert [asked.instance_id for asked in nodes.asked] == ["i-n1"] * 3, "n2 has less to do, but not the prompt"


def test_other_prompts_do_not_wait_and_go_anywhere() -> None:
    async def held(nodes: Nodes, flying: InFlightQuery, stream: Any) -> Any:
        seen = {(await anext(stream))[0] for _ in range(4)}
        assert seen == {0, 1}
        nodes.gate.set()
        return await whole(nodes, flying, stream)

    nodes, _, _ = run(lambda: Nodes(gated=frozenset({0})), query_of(2), held)
    assert len(nodes.asked) == 2


def test_prompts_count_once_and_answers_all() -> None:
    _, flying, _ = run(Nodes, query_of(2, n=2, best_of=3), whole)
    assert flying.usage() == TokenUsage(prompt_tokens=20, completion_tokens=12, cached_tokens=0 + 3, reasoning_tokens=0)
    assert (flying.prompt_tokens, flying.output_tokens, flying.used_tokens) == (20, 12, 32)
    one = in_flight(query_of(), Fleet())
    assert flying.input_tokens == 2 * one.input_tokens
    assert flying.tokens == 2 * one.input_tokens + 6 * 5, "what it may take: each prompt, and max_tokens six times"


def test_one_that_fails_ends_them_all() -> None:
    async def failing(nodes: Nodes, flying: InFlightQuery, stream: Any) -> Any:
        with pytest.raises(NodeError) as failed:
            await whole(nodes, flying, stream)
        return nodes, failed.value

    nodes, error = run(lambda: Nodes(gated=frozenset({1}), fails=2), query_of(n=3), failing)
    assert error.code == "invalid_value"
    assert sorted(nodes.cancelled) == [1, 2]


def test_a_reader_that_leaves_cancels_all() -> None:
    made: list[Nodes] = []

    async def leaving(nodes: Nodes, flying: InFlightQuery, stream: Any) -> Any:
        made.append(nodes)
        async for _ in stream:
            if len(nodes.asked) == 3:
                return

    run(lambda: Nodes(gated=frozenset({1, 2})), query_of(n=3), leaving)
    assert {1, 2} <= set(made[0].cancelled)


@pytest.mark.parametrize(
    ("released_to", "context_tokens", "sent_to"),
    [
        ("i-n2", (None, None), "i-n2"),
        ("i-gone", (None, None), "i-n1"),
        (None, (None, None), "i-n1"),
        ("i-n2", (6, 5), "i-n1"),  # one of prompt and five of answer
        ("i-n2", (5, 5), "i-n2"),  # by the estimate nobody takes it
    ],
)
def test_a_batch_request_goes_where_it_has_room_if_it_still_can(
    released_to: str | None,
    context_tokens: tuple[int | None, int | None],
    sent_to: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Crowded, "context_tokens", context_tokens)

    async def released(nodes: Nodes, flying: InFlightQuery, stream: Any) -> Any:
        flying.first.released_to = released_to
        return await whole(nodes, flying, stream)

    nodes, _, _ = run(Nodes, query_of(), released)
    assert [asked.instance_id for asked in nodes.asked] == [sent_to], "n1 has less to do"


def test_choices_follow_the_first_one_out_of_their_region() -> None:
    """A deferred request whose region has no room for it: its choices share the prompt elsewhere, too."""
    fleet = Fleet()
    first, second = fleet.instances()
    away = replace(second, endpoint=replace(second.endpoint, region="away"))
    third = replace(away, instance_id="i-n0", node_id="n0")
    small = replace(first, context_tokens=5)
    flying = in_flight(query_of(n=2), fleet).choices[1]
    flying.only_region, flying.beside = small.endpoint.region, away.instance_id
    sender = Sender(fleet, Nodes(), settings())
    asked = replace(sender.routing_facts(flying), instances=(small, third, away), draw=None)
    route = sender._choose_route(flying, asked)
    assert isinstance(route, Route)
    assert route.instance_id == away.instance_id
    flying.beside = None
    route = sender._choose_route(flying, asked)
    assert isinstance(route, Route)
    assert route.instance_id == third.instance_id, "the first by id, if it followed nobody"
