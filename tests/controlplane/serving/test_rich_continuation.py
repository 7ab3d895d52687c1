"""A stream with reasoning, tool calls and log probabilities whose node is lost anywhere: the client sees one answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from controlplane.serving.agent_client import AgentClient
from controlplane.serving.answers import Renderer, whole_answer
from controlplane.serving.chat_answers import ChatRenderer
from controlplane.serving.fan_out import InFlightQuery, send_query
from controlplane.serving.query import Query
from controlplane.serving.send import Sender
from dataplane.agent.answers import answer_text
from dataplane.agent.parsing.answer_text import AnswerText
from dataplane.agent.parsing.families import REASONING_FORMATS, TOOL_FAMILIES, Families
from dataplane.protocol.messages import (
    ChatMessage,
    Finished,
    Generate,
    Sampling,
    Started,
    StreamEvent,
    Token,
    TokenLogprob,
    Tool,
    ToolCallDelta,
    ToolUse,
    TopLogprob,
)
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving import test_continuation
from tests.controlplane.serving.scripted import ScriptedConnections, encoded
from tests.controlplane.serving.test_continuation import MODEL, Fleet, settings

PIECES: tuple[dict[str, Any], ...] = (
    {"reasoning": "the tide"},
    {"reasoning": " turns"},
    {"text": "So "},
    {"text": ""},
    {"text": "it is."},
    {"tool_calls": (ToolCallDelta(index=0, name="look"),)},
    {"tool_calls": (ToolCallDelta(index=0, arguments='{"at":'),)},
    {"tool_calls": (ToolCallDelta(index=0, arguments='"sea"}'), ToolCallDelta(index=1, name="time", arguments="{"))},
)
"""What each token adds. The last call's end is certain only when no token follows."""
TAIL = Token(text="", tool_calls=(ToolCallDelta(index=1, arguments="}"),))
END = Finished(finish_reason="tool_calls", prompt_tokens=5, completion_tokens=8, reasoning_tokens=2)


def token(number: int) -> Token:
    logprob = TokenLogprob(TopLogprob(number, f"t{number}", (116,), -number / 8))
    return Token(**{"text": ""} | PIECES[number], token_ids=(number,), logprobs=(logprob,))


class Nodes(AgentClient):
    """Two nodes that make the tokens of PIECES. The stream of the first that is asked breaks off after `lines`
    lines. `together`: so many lines arrive at once.
    """

    def __init__(self, lines: int, together: int) -> None:
        super().__init__(settings(), connections=ScriptedConnections(self._answer))
        self.lines, self.together = lines, together
        self.asked: list[Generate] = []

    def _answer(self, _node: str, generate: Generate) -> AsyncIterator[bytes]:
        self.asked.append(generate)
        return self._stream(generate, lost=len(self.asked) == 1)

    async def _stream(self, generate: Generate, *, lost: bool) -> AsyncIterator[bytes]:
        begun = len(generate.generated)
        events: list[StreamEvent] = [Started(prompt_tokens=5), *map(token, range(begun, len(PIECES))), TAIL, END]
        lines = [encoded(event, generate) for event in (events[: self.lines] if lost else events)]
        for first in range(0, len(lines), self.together):
            yield b"".join(lines[first : first + self.together])
        if lost and self.lines < len(events):
            raise ConnectionError("the node is gone")


class ParsingNodes(test_continuation.Nodes):
    """Two nodes that make the tokens of `test_continuation.BYTES` through the agent's own parsers. The stream of the
    first that is asked breaks off.
    """

    def _stream(self, generate: Generate, node: str) -> AsyncIterator[bytes]:
        self.lost = {node} if len(self.asked) == 1 else set()
        return super()._stream(generate, node)

    def text_of(self, generate: Generate) -> AnswerText:
        families = Families(tools=TOOL_FAMILIES["hermes"], reasoning=REASONING_FORMATS["qwen3"])
        return answer_text(generate, test_continuation.ByteTokenizer(), families, "")  # type: ignore[arg-type]


def query(nodes: AgentClient) -> tuple[Sender, InFlightQuery, Renderer]:
    fleet = Fleet()
    message = Generate(
        request_id="",
        instance_id="",
        model="tide",
        tier=Tier.IW_N,
        messages=(ChatMessage(role="user", content="x"),),
        sampling=Sampling(seed=1, logprobs=0),
        tools=ToolUse(tools=(Tool(name="look"),)),
    )
    asked = Query(prompts=(message,))
    flying = InFlightQuery.of(fleet, MODEL, asked, asked.choices("r"), tenant="acme", origin=None)
    return Sender(fleet, nodes, settings()), flying, ChatRenderer(asked, answer_id="r")


async def answered(nodes: AgentClient) -> dict[str, Any]:
    sender, flying, renderer = query(nodes)
    try:
        return await whole_answer(send_query(sender, flying), flying, renderer) | {"created": 0}
    finally:
        await nodes.close()


async def whole(lines: int, together: int = 1) -> tuple[dict[str, Any], int]:
    nodes = Nodes(lines, together)
    return await answered(nodes), len(nodes.asked)


async def streamed(lines: int, together: int = 1) -> dict[str, Any]:
    """The streamed answer, put together as clients do."""
    nodes = Nodes(lines, together)
    sender, flying, renderer = query(nodes)
    flying.first.text_frame = renderer.text_frame(0)
    written = renderer.begin()
    try:
        async for choice, events in send_query(sender, flying):
            written += renderer.events(choice, events)
    finally:
        await nodes.close()
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "logprobs": [], "ends": []}
    for line in written.split(b"\n\n")[:-1]:
        [choice] = msgspec.json.decode(line.removeprefix(b"data: "))["choices"]
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            kept = message["tool_calls"].setdefault(
                call["index"], {"id": call.get("id"), "name": None, "arguments": ""}
            )
            kept["name"] = call["function"].get("name") or kept["name"]
            kept["arguments"] += call["function"]["arguments"]
        message["logprobs"] += [each["token"] for each in (choice["logprobs"] or {}).get("content", ())]
        message["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message


@pytest.mark.parametrize("together", [1, 3])
def test_a_node_lost_at_any_line_changes_nothing(together: int) -> None:
    async def run() -> None:
        (undisturbed, asked), undisturbed_stream = await whole(99), await streamed(99)
        assert asked == 1
        for lines in range(len(PIECES) + 3):
            answer, asked = await whole(lines, together)
            assert answer == undisturbed, lines
            assert asked == 2
            assert await streamed(lines, together) == undisturbed_stream, lines

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('<think>hm é</think>So <tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>', "stop"),
        ("<think>hm</thi", "length"),
        ("<think>hm</thi", "stop"),
        ('<think>hm</think><tool_call>{"name": "look", "argum', "length"),
        ("So it is. <tool_ca", "stop"),
    ],
)
def test_what_the_agent_parses_is_the_same_wherever_its_node_is_lost(
    monkeypatch: pytest.MonkeyPatch, text: str, end: str
) -> None:
    monkeypatch.setattr(test_continuation, "BYTES", text.encode())

    async def run() -> None:
        undisturbed = await answered(ParsingNodes(10**6, end=end))
        for lines in range(len(text.encode()) + 2):
            nodes = ParsingNodes(lines, end=end)
            assert await answered(nodes) == undisturbed, lines
            assert len(nodes.asked) == 2

    asyncio.run(run())


def test_the_streamed_answer_is_the_whole_one() -> None:
    async def run() -> None:
        (answer, _), stream = await whole(99), await streamed(99)
        [choice] = answer["choices"]
        message = choice["message"]
        assert stream["content"] == message["content"] == "So it is."
        assert stream["reasoning_content"] == message["reasoning_content"] == "the tide turns"
        assert list(stream["tool_calls"].values()) == [
            {"id": call["id"], **call["function"]} for call in message["tool_calls"]
        ]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"at":"sea"}', "{}"]
        assert stream["logprobs"] == [each["token"] for each in choice["logprobs"]["content"]]
        assert len(stream["logprobs"]) == answer["usage"]["completion_tokens"]
        assert stream["ends"] == [choice["finish_reason"]] == ["tool_calls"]

    asyncio.run(run())
