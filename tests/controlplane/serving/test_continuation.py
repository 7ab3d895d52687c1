"""A stream whose node is lost at any token goes on elsewhere, and is what it would have been."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.errors import NodeError
from controlplane.policies.facts import Endpoint, InstanceFacts
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.in_flight_tokens import Sending
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from controlplane.store.redis.live import EMPTY_VIEW, FleetView, Sums
from controlplane.store.tables import Model
from dataplane.agent.answers import Answer
from dataplane.agent.detokenization import IncrementalDetokenizer
from dataplane.agent.measures import RequestMeasure, RequestMeasures
from dataplane.agent.parsing.answer_text import AnswerText
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.protocol import messages
from dataplane.protocol.messages import (
    ANSWER_FAILED,
    STALE_EPOCH,
    Failed,
    Finished,
    Generate,
    Sampling,
    Started,
    Token,
)
from dataplane.protocol.records import TextRecord
from dataplane.protocol.tiers import Objective, Tier
from tests.controlplane.serving.scripted import ScriptedConnections, encoded

BYTES = "tide 🌊 naïve «STO» 海 STOP rest".encode()
"""Each byte is a token, so characters come in halves."""
FRAME = "data: {", "}\n\n"
MODEL = Model(name="tide", path="/x", architecture="L", weights_bytes=1, kv_bytes_per_token=1, context_tokens=4096)


class ByteTokenizer:
    """A tokenizer of bytes."""

    template = None

    def encode_text(self, prompt: str, **_: Any) -> tuple[int, ...]:
        return tuple(prompt.encode())

    def special_id(self, token: str) -> int | None:
        return None

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode(errors="replace")

    def piece(self, token_id: int) -> str | None:
        return chr(token_id) if token_id < 128 else None

    def check_tokens(self, token_ids: Any, param: str) -> None:
        return None


class Nodes(AgentClient):
    """Two nodes that make the tokens of BYTES through the agent's own answers. The first one's streams break off after
    `lines` lines, in the middle of the next one; `ends` is how: by a broken connection, a `Failed` of a
    worker or of an answer that cannot be made, a newer claim.
    """

    def __init__(self, lines: int, *, ends: str = "broken", end: str = "length", old: bool = False) -> None:
        super().__init__(settings(), connections=ScriptedConnections(self._answer, old=old))
        self.lines, self.ends, self.end = lines, ends, end
        self.asked: list[Generate] = []
        self.lost: set[str] = {"n1"}
        self.connections_are_old = old

    def _answer(self, node: str, generate: Generate) -> AsyncIterator[bytes]:
        self.asked.append(generate)
        return self._stream(generate, node)

    async def _stream(self, generate: Generate, node: str) -> AsyncIterator[bytes]:
        sent = 0
        async for line in self._lines(generate):
            if node in self.lost and sent == self.lines:
                if self.ends == "stale":
                    yield encoded(Failed(status=409, code=STALE_EPOCH, message="older", retryable=True), generate)
                    return
                if self.ends == "cannot":
                    yield encoded(Failed(status=500, code=ANSWER_FAILED, message="a defect"), generate)
                    return
                if self.ends == "failed":
                    yield encoded(Failed(status=503, code="worker_lost", message="lost", retryable=True), generate)
                    return
                yield line[: len(line) // 2]
                raise ConnectionError("the node is gone")
            sent += 1
            yield line

    def text_of(self, generate: Generate) -> AnswerText:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), generate.sampling.stop)
        return AnswerText(detokenizer, sent_chars=generate.sent_chars)

    async def _lines(self, generate: Generate) -> AsyncIterator[bytes]:
        request = EngineRequest(
            request_id="r", instance_id="i", tier="IW-N", prompt=(1,), generated=generate.generated, max_tokens=99
        )
        flight = InflightRequest(request=request, model="tide", arrived_s=0.0)
        for token_id in BYTES[len(generate.generated) :][:-1]:
            flight.outputs.put(EngineOutput(request_id="r", token_ids=(token_id,)))
        last = BYTES[-1:] if len(generate.generated) < len(BYTES) else b""
        if self.end == "length":  # the last output brings a token, or none: the end of sequence
            flight.outputs.put(EngineOutput(request_id="r", token_ids=tuple(last), finish_reason="length"))
        else:
            if last:
                flight.outputs.put(EngineOutput(request_id="r", token_ids=tuple(last)))
            flight.outputs.put(EngineOutput(request_id="r", finish_reason="stop"))
        text = self.text_of(generate)
        resumed = text.resume(generate.generated)
        measure = RequestMeasure(RequestMeasures(CollectorRegistry()), "tide", 1, lambda: 0.0)
        async for event in Answer(flight, text, cancel=lambda _: None, measure=measure, resumed=resumed).events():
            yield encoded(event, generate)


class Fleet(FleetCache):
    """A fleet of two nodes that needs no servers; n1 has less to do, by more than what either has cached."""

    def __init__(self) -> None:
        self.gone: set[str] = set()

    def instances(self, model: str | None = None) -> tuple[InstanceFacts, ...]:
        return tuple(
            InstanceFacts(
                instance_id=f"i-{node}",
                node_id=node,
                endpoint=Endpoint(model="tide", region="east"),
                gpu_type="H800",
                accepting=True,
                age_s=0.0,
                kv_used_bytes=0,
                kv_capacity_bytes=100,
                remaining_tokens=1000 * rank,
            )
            for rank, node in enumerate(("n1", "n2"))
            if node not in self.gone
        )

    def preference(self, origin: str | None) -> tuple[str, ...]:
        return ("east",)

    def node_url(self, node: str) -> str:
        return f"http://{node}"

    @property
    def view(self) -> FleetView:
        return EMPTY_VIEW

    def cache_salt(self, tenant: str, given: str) -> str:
        return tenant + given

    def objective(self, model: Model, tier: Tier) -> Objective | None:
        return Objective(ttft_s=0.5, tbt_s=0.02) if tier == Tier.IW_N else None

    def note_sent(self, instance_id: str, tokens: int, input_tokens: int = 0) -> Sending:
        return Sending(0.0, Sums(tokens, input_tokens, 1))

    def note_refused(self, instance_id: str, sending: Sending) -> None:
        return None


def settings(**changes: Any) -> Settings:
    return Settings(**{"stream_continue_wait_s": 5.0} | changes)


async def ask(
    nodes: Nodes, *, fleet: Fleet | None = None, way: str = "events", **changes: Any
) -> tuple[str, list[int], Finished, int]:
    """Text, token ids, end and number of placements of one stream. `way`: "records" asks for them, and "passed" takes
    their text past the stream; "half" takes every other piece so, as a client does that does not keep up.
    """
    fleet = fleet or Fleet()
    sender = Sender(fleet, nodes, settings(**changes))
    stop = Sampling(stop=("STOP",))
    message = Generate(request_id="q", instance_id="", model="tide", tier=Tier.IW_N, sampling=stop, prompt="x")
    request = InFlightRequest.of(fleet, MODEL, message, tenant="t", origin=None)
    text, token_ids, end, placed, passed = "", [], None, 0, 0

    def read(record: TextRecord) -> None:
        nonlocal text
        before, after = (part.encode() for part in FRAME)
        pieces = [each.removeprefix(before) for each in record.payload.split(after) if each]
        new = "".join(map(msgspec.json.decode, pieces))
        assert len(new) == record.chars
        text += new
        token_ids.extend(record.token_ids)

    def pass_on(record: TextRecord) -> bool:
        nonlocal passed
        passed += 1
        if way == "half" and passed % 2:
            return False
        read(record)
        return True

    if way != "events":
        request.text_frame = FRAME
    try:
        async with aclosing(sender.send(request)) as sent:
            async for events in sent:
                request.pass_on = pass_on if way in {"passed", "half"} else None
                for event in events:
                    if isinstance(event, TextRecord):
                        read(event)
                    elif isinstance(event, Token):
                        text += event.text
                        token_ids += event.token_ids
                    placed += isinstance(event, Started)
                    end = event if isinstance(event, Finished) else end
    finally:
        await nodes.close()
    assert end is not None
    assert bool(passed) == (way in {"passed", "half"} and not nodes.connections_are_old)
    return text, token_ids, end, placed


@pytest.mark.parametrize("way", ["events", "records", "passed", "half"])
@pytest.mark.parametrize("ends", ["broken", "failed"])
@pytest.mark.parametrize(("stop", "end"), [(True, "length"), (False, "length"), (False, "stop")])
def test_a_node_lost_at_any_line_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, way: str, ends: str, stop: bool, end: str
) -> None:
    if not stop:  # then the text ends in what might have become a stop string, or in half a character
        monkeypatch.setitem(globals(), "BYTES", "naïve 海 STO".encode() + ("海".encode()[:2] if end == "stop" else b""))

    async def run() -> None:
        undisturbed = await ask(Nodes(10**6, end=end))
        assert undisturbed[3] == 1
        for lines in range(len(BYTES) + 3):
            nodes = Nodes(lines, ends=ends, end=end)
            text, token_ids, finished, _ = await ask(nodes, way=way)
            assert (text, token_ids, finished) == undisturbed[:3], lines
            assert len({asked.sampling.seed for asked in nodes.asked}) == 1, "all of one piece"
            assert nodes.asked[0].sampling.seed is not None
            promised = [asked.objective for asked in nodes.asked]
            assert promised == [messages.Objective(ttft_s=0.5, tbt_s=0.02)] * len(promised), "wherever it goes on"
            if 1 < lines < len(undisturbed[1]):
                assert [asked.instance_id for asked in nodes.asked] == ["i-n1", "i-n2"]

    asyncio.run(run())


def test_nodes_of_an_older_version_answer_in_lines() -> None:
    async def run() -> None:
        undisturbed = await ask(Nodes(10**6))
        text, token_ids, finished, _ = await ask(Nodes(7, old=True), way="passed")
        assert (text, token_ids, finished) == undisturbed[:3]

    asyncio.run(run())


@pytest.mark.parametrize("lines", [0, 3])
def test_a_claim_that_is_no_longer_the_newest_goes_nowhere_else(lines: int) -> None:
    async def run() -> None:
        nodes = Nodes(lines, ends="stale")
        with pytest.raises(NodeError, match="older"):
            await ask(nodes)
        assert len(nodes.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize("lines", [0, 3])
def test_an_answer_that_cannot_be_made_goes_nowhere_else(lines: int) -> None:
    async def run() -> None:
        nodes = Nodes(lines, ends="cannot")
        with pytest.raises(NodeError, match="a defect") as raised:
            await ask(nodes)
        assert (len(nodes.asked), raised.value.retryable) == (1, False)

    asyncio.run(run())


def test_the_number_of_continuations_is_bounded() -> None:
    async def run() -> None:
        nodes = Nodes(2)
        nodes.lost = {"n1", "n2"}
        with pytest.raises(NodeError, match="broke off"):
            await ask(nodes, stream_continuations_max=3)
        assert len(nodes.asked) == 4

    asyncio.run(run())


def test_a_broken_stream_waits_for_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only node failed: as soon as it is back, the stream goes on there."""
    looks, fleet = 0, Fleet()
    fleet.gone = {"n2"}

    async def look_again(_s: float) -> None:
        nonlocal looks
        looks += 1
        fleet.gone.add("n1")
        if looks == 3:
            lost.clear()
            fleet.gone.discard("n1")

    async def run() -> None:
        nodes = Nodes(7)
        nodes.lost = lost
        monkeypatch.setattr("controlplane.serving.send.asyncio.sleep", look_again)
        text, _, finished, placed = await ask(nodes, fleet=fleet)
        assert (text, placed, looks) == ("tide 🌊 naïve «STO» 海 ", 2, 3)
        assert finished.finish_reason == "stop"

    lost = {"n1"}
    asyncio.run(run())


def test_a_broken_stream_does_not_wait_for_ever() -> None:
    async def run() -> None:
        fleet = Fleet()
        fleet.gone = {"n2"}
        with pytest.raises(NodeError, match="broke off"):
            await ask(Nodes(5), fleet=fleet, stream_continue_wait_s=0.0)

    asyncio.run(run())
