"""A conversation as chat templates read it, in the form that transformers defines; and as plain text without one.

Templates differ in two points that no field tells: whether the arguments of a call are an object or JSON text, and
whether a message that only calls tools has no content or an empty one. `spellings` gives the variants in order.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import product
from typing import Any

from dataplane.agent.templates.frames import is_encodable
from dataplane.protocol.messages import ChatMessage, Tool, ToolCall

CallText = Callable[[str, str], str]
"""How a model writes a call, from the function's name and its arguments as JSON text."""

_SHORT_ID_CHARS = 9
_SHORT_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def spellings(messages: Sequence[ChatMessage], *, short_ids: bool) -> Iterator[list[dict[str, Any]]]:
    """The messages of a template, in each variant that templates know; only one where no tool is called. `short_ids`:
    ids of calls have nine letters and digits, as Mistral's templates demand.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    calls = bool(names)
    for empty, as_object in product((None, ""), (True, False)) if calls else (("", True),):
        yield [_message(each, names, short_ids, as_object=as_object, empty=empty) for each in messages]


def tool_schemas(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """The tools as OpenAI's API describes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def tools_as_text(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], call_text: CallText
) -> tuple[ChatMessage, ...]:
    """The conversation for a template that cannot describe tools: a system message does."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in tool_schemas(tools)]
    example = call_text("function name", '{"parameter name": "value"}')
    text = "You may call these functions:\n" + "\n".join(lines) + f"\nTo call one, answer with:\n{example}"
    if messages and messages[0].role == "system":
        return ChatMessage(role="system", content=f"{messages[0].content}\n\n{text}"), *messages[1:]
    return ChatMessage(role="system", content=text), *messages


def calls_as_text(messages: Sequence[ChatMessage], call_text: CallText) -> tuple[ChatMessage, ...]:
    """The conversation for a template that knows no calls: they are content, and their results the user's messages."""
    return tuple(_plain_message(message, messages, call_text) for message in messages)


def plain_text(messages: Sequence[ChatMessage], *, answer: bool = True) -> str:
    """`role: content` lines, for models without a chat template; with `answer`, up to where the answer begins."""
    lines = [f"{message.role}: {message.content}" for message in messages]
    return "\n".join([*lines, "assistant:"] if answer else lines)


def _message(
    message: ChatMessage, names: dict[str, str], short_ids: bool, *, as_object: bool, empty: str | None
) -> dict[str, Any]:
    """One message. Absent fields are left out: templates ask whether they are defined."""

    def spelled_id(given: str) -> str:
        return _short_id(given) if short_ids else given

    spelled: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        spelled["content"] = message.content or empty
        spelled["tool_calls"] = [
            {
                "id": spelled_id(call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call) if as_object else call.arguments},
            }
            for call in message.tool_calls
        ]
    name = message.name or names.get(message.tool_call_id or "")
    if name is not None:
        spelled["name"] = name
    if message.tool_call_id is not None:
        spelled["tool_call_id"] = spelled_id(message.tool_call_id)
    if message.reasoning is not None:
        spelled["reasoning_content"] = spelled["thinking"] = message.reasoning
    return spelled


def _arguments(call: ToolCall) -> Any:
    """The arguments as an object; what a model wrote wrongly, or no template can be given, stays text."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if isinstance(arguments, dict) and is_encodable(arguments) else call.arguments


def _short_id(given: str) -> str:
    if len(given) == _SHORT_ID_CHARS and given.isascii() and given.isalnum():
        return given
    digest = blake2b(given.encode(), digest_size=_SHORT_ID_CHARS).digest()
    return "".join(_SHORT_ID_LETTERS[byte % len(_SHORT_ID_LETTERS)] for byte in digest)


def _plain_message(message: ChatMessage, messages: Sequence[ChatMessage], call_text: CallText) -> ChatMessage:
    if message.tool_calls:
        calls = [call_text(call.name, call.arguments or "{}") for call in message.tool_calls]
        return ChatMessage(role=message.role, content="\n".join(filter(None, [message.content, *calls])))
    if message.role == "tool":
        called = (call.name for one in messages for call in one.tool_calls if call.id == message.tool_call_id)
        name = message.name or next(called, "the function")
        return ChatMessage(role="user", content=f"Result of {name}: {message.content}")
    return message
