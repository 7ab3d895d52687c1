"""A gateway moves requests from a long queue to an instance that is idle, and their clients see one answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from controlplane.policies.facts import InstanceFacts
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.rerouting import Rerouter
from controlplane.serving.send import Sender
from dataplane.protocol.messages import Failed, Finished, Generate, Sampling, Started, Token
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving.scripted import ScriptedConnections, encoded
from tests.controlplane.serving.test_continuation import MODEL, Fleet, settings


class Nodes(AgentClient):
    """n1 stops before the token with number `tokens` until `go`; n2 answers at once, or
    refuses with a status.
    """

    def __init__(self, tokens: int = 0, *, refusal: int = 0) -> None:
        super().__init__(settings(), connections=ScriptedConnections(self._answer))
        self.refusal = refusal
        self.asked: list[tuple[str, Generate]] = []
        self.cancelled: list[str] = []
        self.tokens = tokens
        self.go = asyncio.Event()

    async def _answer(self, node: str, asked: Generate) -> AsyncIterator[bytes]:
        self.asked.append((node, asked))
        made = len(asked.generated)
        if node == "n2" and self.refusal:
            yield encoded(Failed(status=self.refusal, code="refused", message="no", retryable=False), asked)
            return
        try:
            yield encoded(Started(prompt_tokens=100), asked)
            for number in range(made, 5):
                if node == "n1" and number == self.tokens:
                    await self.go.wait()
                yield encoded(Token(text=f"{number} ", token_ids=(number,)), asked)
        except asyncio.CancelledError:
            self.cancelled.append(node)
            raise
        yield encoded(Finished(finish_reason="length", prompt_tokens=100, completion_tokens=5), asked)


class TwoQueues(Fleet):
    """n1 has 4 s of prefills before a new request; n2, which is ready when it is no longer `gone`, has none."""

    def __init__(self, *, wait_s: float = 4.0) -> None:
        super().__init__()
        self.wait_s, self.waiting = wait_s, 0
        self.gone.add("n2")

    def instances(self, model: str | None = None) -> tuple[InstanceFacts, ...]:
        waits_s = {"n1": self.wait_s, "n2": 0.0}
        return tuple(
            msgspec.structs.replace(
                one, prefill_wait_s=waits_s[one.node_id], prefill_token_s=0.001, waiting=self.waiting
            )
            for one in super().instances(model)
        )


class Gateway:
    """Requests of one gateway that run concurrently."""

    def __init__(self, nodes: Nodes, fleet: TwoQueues) -> None:
        self.nodes = nodes
        self.fleet = fleet
        self.moved: list[tuple[str, str]] = []
        self.sender = Sender(fleet, nodes, settings())
        self.rerouter = Rerouter(
            fleet, self.sender, settings(), on_move=lambda model, tier: self.moved.append((model, tier))
        )
        self.requests: list[InFlightRequest] = []
        self.tasks: list[asyncio.Task[str]] = []

    def look(self) -> None:
        """n2 is ready, and the gateway looks."""
        self.fleet.gone.clear()
        self.rerouter.look()

    async def begin(self, count: int, *, tier: Tier = Tier.IW_N, prompt: str = "", **changes: Any) -> None:
        """Send so many requests, until each has been accepted."""
        self.fleet.waiting += count
        for _ in range(count):
            message = Generate(
                request_id="q",
                instance_id="",
                model="tide",
                tier=tier,
                sampling=Sampling(),
                prompt=prompt or f"{len(self.requests)} ".ljust(1600, "x"),
            )
            request = InFlightRequest.of(self.fleet, MODEL, message, tenant="t", origin=None)
            for name, value in changes.items():
                setattr(request, name, value)
            self.requests.append(request)
            self.tasks.append(asyncio.create_task(self._text(request)))
            await settle()

    async def end(self) -> list[str]:
        """The texts, once n1 answers too."""
        self.nodes.go.set()
        texts = await asyncio.gather(*self.tasks)
        await self.nodes.close()
        return texts

    async def _text(self, request: InFlightRequest) -> str:
        text = ""
        async with aclosing(self.sender.send(request)) as stream:
            async for events in stream:
                text += "".join(event.text for event in events if isinstance(event, Token))
        return text

    def places(self) -> list[list[str]]:
        return [[route.node_id for route in request.routes] for request in self.requests]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


WHOLE = "0 1 2 3 4 "


def test_the_first_that_would_wait_moves_and_the_others_stay() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(4)  # 0, 1, 2 and 3 s before them
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"], ["n1", "n2"], ["n1"], ["n1"]]
        assert gateway.nodes.cancelled == ["n1"], "the first instance need not compute it"
        assert gateway.moved == [("tide", "IW-N")]
        assert await gateway.end() == [WHOLE] * 4
        assert len({asked.sampling.seed for _, asked in gateway.nodes.asked}) == 4, "the same seed at both instances"
        assert not gateway.sender.waiting

    asyncio.run(run())


def test_it_moves_once() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(2)
        gateway.rerouter.look()  # nowhere to go
        assert gateway.places() == [["n1"], ["n1"]]
        gateway.look()
        gateway.fleet.gone.add("n2")  # gone before the request is there: back to where it was
        await settle()
        assert gateway.places() == [["n1"], ["n1", "n1"]]
        for _ in range(3):
            gateway.look()
            await settle()
        assert gateway.places()[1] == ["n1", "n1"]
        assert await gateway.end() == [WHOLE] * 2

    asyncio.run(run())


@pytest.mark.parametrize("status", [400, 503])
def test_an_instance_that_refuses_what_moved_does_not_end_it(status: int) -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(refusal=status), TwoQueues())
        await gateway.begin(4)
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"], ["n1", "n2", "n1"], ["n1"], ["n1"]]
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_who_was_refused_there_does_not_go_there() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(4, excluded={"i-n2"})
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"]] * 4
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_nothing_moves_while_requests_wait_for_connections() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(4)
        for _ in range(settings().node_connections_max - 4):
            await gateway.nodes._free.acquire()
        assert gateway.nodes.is_full
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"]] * 4
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_what_a_request_asks_for_is_known_where_it_is_routed() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        message = Generate(
            request_id="q", instance_id="", model="tide", tier=Tier.IW_N, sampling=Sampling(max_tokens=70), prompt="x"
        )
        await gateway.begin(1, message=message)
        (request,), (attempt,) = gateway.requests, gateway.sender.waiting
        facts, waiting = gateway.sender.routing_facts(request), attempt.facts("q")
        assert (facts.input_tokens, facts.output_tokens_max) == (request.input_tokens, 70)
        assert (waiting.input_tokens, waiting.output_tokens_max) == (request.input_tokens, 70)
        await gateway.end()

    asyncio.run(run())


def test_what_the_first_instance_has_cached_stays_known() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        shared = "y" * 300
        gateway.nodes.go.set()
        await gateway.begin(1, prompt=shared + "0" * 1300)
        await asyncio.gather(*gateway.tasks)
        gateway.nodes.go.clear()
        gateway.fleet.waiting = 0
        for number in range(1, 5):
            await gateway.begin(1, prompt=shared + f"{number}" * 1300)
        gateway.look()
        await settle()
        assert ["n1", "n2"] in gateway.places()
        known = gateway.sender.routing_facts(gateway.requests[0]).cached_tokens
        assert known["i-n1"] > 350, "all of the first prompt, and so what it shares with those that moved"
        assert await gateway.end() == [WHOLE] * 5

    asyncio.run(run())


@pytest.mark.parametrize("tokens", [1, 3])
def test_an_answer_that_has_begun_stays(tokens: int) -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(tokens), TwoQueues())
        await gateway.begin(4)
        assert not gateway.sender.waiting
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"]] * 4
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_a_token_on_its_way_to_its_reader_is_not_lost() -> None:
    """The first token arrives after the look has chosen and before the reader has taken it."""

    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(4)
        gateway.nodes.go.set()
        for _ in range(6):
            await asyncio.sleep(0)
            gateway.look()
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


@pytest.mark.parametrize("changes", [{"tier": Tier.NIW}, {"beside": "i-n1"}])
def test_who_was_sent_for_another_reason_stays(changes: dict[str, Any]) -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(4, **changes)
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"]] * 4
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_a_continued_stream_that_waits_moves_too() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(2), TwoQueues())
        await gateway.begin(4, token_ids=[0, 1], sent_chars=4)
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"], ["n1", "n2"], ["n1"], ["n1"]]
        assert gateway.nodes.asked[-1][1].generated == (0, 1)
        assert await gateway.end() == ["2 3 4 "] * 4

    asyncio.run(run())


def test_who_has_its_prompt_cached_stays() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        await gateway.begin(4, prompt="x" * 1600)
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"]] * 4
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_short_queues_stay() -> None:
    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues(wait_s=1.0))
        await gateway.begin(4)
        gateway.look()
        await settle()
        assert gateway.places() == [["n1"]] * 4
        await gateway.end()

    asyncio.run(run())


@pytest.mark.parametrize(("wait_s", "moves"), [(0.0, False), (1.0, True)])
def test_it_looks_by_itself_unless_that_is_off(wait_s: float, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.serving.rerouting._LOOK_EVERY_S", 0.01)

    async def run() -> None:
        gateway = Gateway(Nodes(), TwoQueues())
        rerouter = Rerouter(
            gateway.fleet, gateway.sender, settings(reroute_wait_s=wait_s), on_move=lambda *_: gateway.moved.append(_)
        )
        async with rerouter.running():
            await gateway.begin(4)
            gateway.fleet.gone.clear()
            await asyncio.sleep(0.1)
        assert bool(gateway.moved) == moves
        assert await gateway.end() == [WHOLE] * 4

    asyncio.run(run())


def test_a_look_that_fails_stops_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.serving.rerouting._LOOK_EVERY_S", 0.01)

    async def run() -> None:
        gateway, looks, again = Gateway(Nodes(), TwoQueues()), list[bool](), asyncio.Event()

        def look() -> None:
            looks.append(not looks)
            if looks[-1]:
                raise ValueError
            again.set()

        monkeypatch.setattr(gateway.rerouter, "look", look)
        async with gateway.rerouter.running(), asyncio.timeout(30):
            await again.wait()
        assert looks[:2] == [True, False], "the first failed, and there was a second"
        await gateway.end()

    asyncio.run(run())
