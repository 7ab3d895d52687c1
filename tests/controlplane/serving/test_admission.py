"""The flex queue: as many as there is room for at once, in order, and never more."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.errors import NoSpareCapacityError
from controlplane.serving.admission import AdmissionController
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.expected_lengths import ExpectedLengths
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.in_flight_tokens import Sending, SentTokens
from controlplane.serving.send import Sender
from dataplane.protocol.messages import Finished, Generate, Sampling, Started
from dataplane.protocol.records import RecordedEvent
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving.test_continuation import MODEL, Fleet, settings
from tests.controlplane.world import PATIENCE_S

CAPACITY, BELOW = 1000, 0.6


class Room(Fleet):
    """One instance of 1,000 tokens, of which it has reported `used`."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.gone = {"n2"}
        self.used = used
        self.sent = SentTokens()
        self.over_before: list[bool] = []
        self._change = asyncio.Event()

    def instances(self, model: str | None = None) -> Any:
        facts = {"kv_used_bytes": self.used, "kv_capacity_bytes": CAPACITY, "kv_bytes_per_token": 1}
        tokens = self.sent.of("i-n1").tokens
        return tuple(replace(one, **facts, sent_tokens=tokens) for one in super().instances(model))

    def note_sent(self, instance_id: str, tokens: int, input_tokens: int = 0) -> Sending:
        self.over_before.append(self.used + self.sent.of(instance_id).tokens >= BELOW * CAPACITY)
        return self.sent.add(instance_id, tokens, input_tokens)

    def note_ended(self, instance_id: str, sending: Sending) -> None:
        self.sent.take_back(instance_id, sending)
        self.change()

    async def changed(self) -> None:
        await self._change.wait()

    def change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


class Holding(AgentClient):
    """Nodes that answer a request when it is `let` end."""

    def __init__(self) -> None:
        super().__init__(settings())
        self.asked: list[str] = []
        self.lets: dict[str, asyncio.Event] = {}

    async def generate(
        self, url: str, request: Generate, *_: Any, **__: Any
    ) -> AsyncGenerator[list[RecordedEvent], None]:
        name = request.request_id.split(".")[0]
        self.asked.append(name)
        yield [Started(prompt_tokens=1)]
        await self.lets.setdefault(name, asyncio.Event()).wait()
        yield [Finished(finish_reason="stop", prompt_tokens=1, completion_tokens=1)]


class ToTheLimit(ExpectedLengths):
    """Answers are expected to be as long as they may."""

    def to_come(self, request: InFlightRequest) -> int:
        return request.message.sampling.max_tokens or 0


class Clients:
    """Flex clients of one gateway. `asked`: the requests that a node has got, in order."""

    def __init__(self, fleet: Room, *, wait_s: float = PATIENCE_S) -> None:
        self.fleet = fleet
        self.nodes = Holding()
        sender = Sender(fleet, self.nodes, settings())  # type: ignore[arg-type]
        set_to = settings(flex_wait_s=wait_s, release_below_one=BELOW)
        self.admission = AdmissionController(sender, fleet, set_to)  # type: ignore[arg-type]
        self._sender = sender
        sender._lengths = ToTheLimit()
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, sizes: Sequence[int], tier: Tier = Tier.NIW) -> None:
        """Clients that arrive one after the other, with requests of so many tokens."""
        for size in sizes:
            self.tasks.append(asyncio.create_task(self._one(f"r{len(self.tasks)}", size, tier)))
            await self.settle()

    async def _one(self, name: str, tokens: int, tier: Tier) -> None:
        sampling = Sampling(max_tokens=tokens - 1)
        message = Generate(request_id=name, instance_id="", model="tide", tier=tier, sampling=sampling, prompt="x")
        request = InFlightRequest.of(self.fleet, MODEL, message, tenant="t", origin=None)  # type: ignore[arg-type]
        facts = await self.admission.enter(request)
        async with aclosing(self._sender.send(request, facts)) as events:
            async for _ in events:
                pass

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(10 + 5 * len(self.tasks)):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.nodes.close()


def fitting(used: int, sizes: Sequence[int]) -> int:
    """How many requests of these sizes are let in, one after the other, while the threshold is not reached."""
    count = 0
    while count < len(sizes) and used < BELOW * CAPACITY:
        used += sizes[count]
        count += 1
    return count


@given(sizes=st.lists(st.integers(2, 300), min_size=1, max_size=12), used=st.integers(0, 1000))
def test_as_many_are_admitted_at_one_look_as_there_is_room_for(sizes: list[int], used: int) -> None:
    async def run() -> None:
        clients = Clients(Room(used=CAPACITY))
        await clients.ask(sizes)
        assert clients.admission.waiting == len(sizes)
        clients.fleet.used = used
        clients.fleet.change()
        await clients.settle()
        expected = fitting(used, sizes)
        assert clients.nodes.asked == [f"r{number}" for number in range(expected)]
        assert clients.admission.waiting == len(sizes) - expected
        assert not any(clients.fleet.over_before), "one was sent beyond the room"
        await clients.close()

    asyncio.run(run())


@given(sizes=st.lists(st.integers(2, 300), min_size=1, max_size=12), used=st.integers(0, 1000))
def test_those_that_arrive_while_there_is_room_do_not_wait(sizes: list[int], used: int) -> None:
    async def run() -> None:
        clients = Clients(Room(used=used))
        await clients.ask(sizes)
        assert len(clients.nodes.asked) == fitting(used, sizes)
        assert not any(clients.fleet.over_before)
        await clients.close()

    asyncio.run(run())


def test_the_end_of_a_request_lets_the_next_in_without_a_new_report() -> None:
    async def run() -> None:
        clients = Clients(Room(used=0))
        await clients.ask([600, 600, 2, 600])
        assert clients.nodes.asked == ["r0"], "a small one does not pass a large one that came before it"
        clients.nodes.lets["r0"].set()
        await clients.settle()
        assert clients.nodes.asked == ["r0", "r1"]
        clients.nodes.lets["r1"].set()
        await clients.settle()
        assert clients.nodes.asked == ["r0", "r1", "r2", "r3"]
        await clients.close()

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_whoever_leaves_the_queue_holds_nobody_up(leaves: int) -> None:
    async def run() -> None:
        clients = Clients(Room(used=CAPACITY))
        await clients.ask([10, 10, 10])
        clients.tasks[leaves].cancel()
        await clients.settle()
        assert clients.admission.waiting == 2
        clients.fleet.used = 0
        clients.fleet.change()
        await clients.settle()
        assert clients.nodes.asked == [f"r{number}" for number in range(3) if number != leaves]
        assert clients.admission.waiting == 0
        await clients.close()

    asyncio.run(run())


def test_interactive_requests_pass_the_queue() -> None:
    async def run() -> None:
        clients = Clients(Room(used=CAPACITY))
        await clients.ask([10])
        await clients.ask([10], Tier.IW_N)
        assert clients.nodes.asked == ["r1"]
        await clients.close()

    asyncio.run(run())


def test_a_request_that_has_waited_long_enough_is_refused_and_the_next_goes_on() -> None:
    async def run() -> None:
        clients = Clients(Room(used=CAPACITY), wait_s=0.01)
        await clients.ask([10])
        with anyio.fail_after(PATIENCE_S), pytest.raises(NoSpareCapacityError, match="no spare capacity"):
            await clients.tasks[0]
        assert clients.admission.waiting == 0
        clients.fleet.used = 0
        await clients.ask([10])
        assert clients.nodes.asked == ["r1"]
        await clients.close()

    asyncio.run(run())
