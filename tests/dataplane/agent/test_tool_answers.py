"""A node whose models call tools: conversations with tools in, structured calls out, by grammar where required."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.agent.parsing.families import TOOL_FAMILIES
from dataplane.protocol.messages import (
    ChatMessage,
    Constraint,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    ModelSpec,
    Sampling,
    StreamEvent,
    Token,
    Tokenize,
    Tokenized,
    Tool,
    ToolCall,
    ToolUse,
)
from tests.dataplane.agent.templates import styles
from tests.dataplane.agent.test_tokenization import write_tokenizer
from tests.dataplane.agent.test_torch_node import instances, torch_settings
from tests.dataplane.engines.torch.tiny import save_tiny
from tests.dataplane.replay_node import Node, running_node
from tests.dataplane.streams import read, token_ids
from tests.event_loop import asynchronous

pytest.importorskip("llguidance", reason="install the node extra")

CONTEXT_TOKENS = 2048
ASKED = (ChatMessage(role="user", content="Rain?"),)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Kyoto", "Osaka"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool(name="weather", parameters=SCHEMA)
TIME = Tool(name="time", parameters={"type": "object", "properties": {}, "additionalProperties": False})


def checkpoint(folder: Path, **changes: Any) -> ModelSpec:
    save_tiny(
        "llama", folder, vocab_size=258, eos_token_id=257, bos_token_id=256, max_position_embeddings=CONTEXT_TOKENS
    )
    write_tokenizer(folder, styles.CHATML)
    values: dict[str, Any] = {
        "name": "tide",
        "path": str(folder),
        "weights_bytes": (folder / "model.safetensors").stat().st_size,
        "kv_bytes_per_token": 2 * 3 * 2 * 12 * 4,
        "context_tokens": CONTEXT_TOKENS,
        "reasoning_parser": "none",
    }
    return ModelSpec(**(values | changes))


def request(number: int, uses: ToolUse | None, **changes: Any) -> Generate:
    values: dict[str, Any] = {
        "request_id": f"r{number}.{len(changes.get('generated', ()))}",
        "instance_id": "i-tide",
        "model": "tide",
        "tier": "IW-F",
        "messages": ASKED,
        "sampling": Sampling(max_tokens=900, temperature=1.0, seed=number),
        "tools": uses,
    }
    return Generate(**(values | changes))


def called(events: list[StreamEvent]) -> list[tuple[str, Any]]:
    """The calls of an answer without any content; the arguments are read as JSON."""
    tokens = [event for event in events if isinstance(event, Token)]
    assert "".join(event.text for event in tokens) == ""
    calls: list[tuple[str, str]] = []
    for delta in (delta for event in tokens for delta in event.tool_calls):
        if delta.name is not None:
            calls.append((delta.name, ""))
        name, arguments = calls[delta.index]
        calls[delta.index] = (name, arguments + delta.arguments)
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check_calls(events: list[StreamEvent]) -> list[str]:
    """The names of the calls of a whole answer, which hold to their schemas."""
    end = events[-1]
    assert isinstance(end, Finished), end
    assert end.finish_reason == "tool_calls"
    calls = called(events)
    for name, arguments in calls:
        if name == "weather":
            assert (arguments["city"] in {"Kyoto", "Osaka"}, 0 <= arguments["days"] <= 9) == (True, True)
        else:
            assert (name, arguments) == ("time", {})
    return [name for name, _ in calls]


def completion_tokens(events: list[StreamEvent]) -> int:
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1].completion_tokens


async def refusal(node: Node, body: Generate) -> Failed:
    [failed] = await read(node, body)
    assert isinstance(failed, Failed), failed
    return failed


async def calls_that_are_required_are_made(node: Node) -> None:
    one = ToolUse(tools=(WEATHER, TIME), choice="required", parallel=False)
    named = ToolUse(tools=(WEATHER, TIME), choice="named", name="time")
    for number in range(3):
        assert len(check_calls(await read(node, request(number, one)))) == 1
    assert check_calls(await read(node, request(3, named))) == ["time"]
    whole = await read(node, request(4, one))
    made = token_ids(whole)
    for cut in (1, len(made) // 3, len(made) // 2, len(made) - 1):
        before = [event for event in whole if isinstance(event, Token)][:cut]
        rest = await read(node, request(4, one, generated=tuple(token_ids(before))))
        assert called([*before, *rest]) == called(whole)
        assert completion_tokens(rest) == completion_tokens(whole)
    hidden = await read(node, request(5, ToolUse(tools=(WEATHER,), choice="none"), sampling=Sampling(max_tokens=9)))
    assert hidden[0] != whole[0], "tools that may not be called are no part of the prompt"


async def what_no_grammar_can_say_is_refused_by_name(node: Node) -> None:
    odd = Tool(name="odd", parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}})
    strict = msgspec.structs.replace(odd, strict=True)
    failed = await refusal(node, request(0, ToolUse(tools=(TIME, strict))))
    assert (failed.status, failed.param) == (400, "tools.1.function.parameters")
    lenient = await read(node, request(1, ToolUse(tools=(TIME, odd), choice="named", name="time")))
    assert check_calls(lenient) == ["time"]
    format_ = Constraint(kind="json_schema", definition='{"type": "string", "pattern": "(?=x)"}')
    failed = await refusal(node, request(2, ToolUse(tools=(TIME,)), constraint=format_))
    assert (failed.status, failed.param) == (400, "response_format")
    failed = await refusal(node, request(3, None, template={"messages": []}))
    assert failed.param == "chat_template_kwargs.messages"


async def a_model_without_parser_has_plain_answers_and_no_required_calls(node: Node) -> None:
    quiet = {"instance_id": "i-quiet", "model": "quiet"}
    plain = await read(
        node, request(0, ToolUse(tools=(TIME,)), **quiet, sampling=Sampling(max_tokens=5, ignore_eos=True))
    )
    assert plain[-1] == Finished(
        finish_reason="length",
        prompt_tokens=plain[-1].prompt_tokens,
        completion_tokens=5,  # type: ignore[union-attr]
    )
    failed = await refusal(node, request(1, ToolUse(tools=(TIME,), choice="required"), **quiet))
    assert (failed.status, failed.param) == (400, "tool_choice")


async def tokens_of_a_conversation_with_tools_and_back(node: Node) -> None:
    call = ToolCall(id="c1", name="weather", arguments='{"city": "Kyoto", "days": 1}')
    turns = (*ASKED, ChatMessage(role="assistant", tool_calls=(call,)))
    asked = Tokenize(
        instance_id="i-tide", model="tide", messages=turns, tools=(WEATHER,), special_tokens=False, spelled=True
    )
    answer = await node.client.post("/tokenize", content=msgspec.json.encode(asked))
    found = msgspec.json.decode(answer.content, type=Tokenized)
    assert found.context_tokens <= CONTEXT_TOKENS
    assert "".join(found.spelled).startswith("<|im_start|>system")
    back = Detokenize(instance_id="i-tide", model="tide", tokens=found.tokens)
    answer = await node.client.post("/detokenize", content=msgspec.json.encode(back))
    text = msgspec.json.decode(answer.content, type=Detokenized).text
    assert TOOL_FAMILIES["hermes"].syntax.text(call.name, call.arguments) in text
    started = await read(node, request(0, ToolUse(tools=(WEATHER,)), messages=turns, sampling=Sampling(max_tokens=1)))
    assert started[0].prompt_tokens == len(found.tokens)  # type: ignore[union-attr]
    for wrong in (asked, back):
        refused = await node.client.post(
            f"/{type(wrong).__name__.lower()}",
            content=msgspec.json.encode(msgspec.structs.replace(wrong, model="ebb")),
        )
        assert (refused.status_code, refused.json()["param"]) == (400, "model")


@asynchronous
async def test_a_node_whose_models_call_tools(tmp_path: Path) -> None:
    specs = [checkpoint(tmp_path / "tide"), checkpoint(tmp_path / "quiet", name="quiet", tool_parser="none")]
    async with running_node(torch_settings(1)) as node:
        await node.hold(1, *instances(specs))
        await calls_that_are_required_are_made(node)
        await what_no_grammar_can_say_is_refused_by_name(node)
        await a_model_without_parser_has_plain_answers_and_no_required_calls(node)
        await tokens_of_a_conversation_with_tools_and_back(node)
