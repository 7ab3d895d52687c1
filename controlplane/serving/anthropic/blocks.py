"""Content blocks of the Messages API: validated, and read as a conversation."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from controlplane.errors import InvalidValueError
from controlplane.serving.openai_fields import PARTS_MAX, JsonObject, Text, item_tag, json_text, only_parts, text_as
from dataplane.protocol.messages import ChatMessage, ToolCall

_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
ToolUseId = Annotated[Text, Field(min_length=1, max_length=128)]


class _Block(BaseModel):
    """Fields of blocks that mean nothing here, such as `cache_control` and `citations`, are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: Text


Texts = Annotated[
    list[TextBlock],
    Field(max_length=PARTS_MAX, fail_fast=True),
    only_parts("text", refusal="only text is supported, not blocks of type '{}'"),
    text_as("text", str | list[TextBlock]),
]


def joined(blocks: Iterable[TextBlock]) -> str:
    """The texts of blocks, a line each."""
    return "\n".join(block.text for block in blocks)


class ToolUseBlock(_Block):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: ToolUseId
    name: Annotated[Text, Field(min_length=1, max_length=128)]
    input: JsonObject


class ToolResultBlock(_Block):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: Texts = []


class ThinkingBlock(_Block):
    """What the model thought earlier; nothing is signed here."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(_Block):
    """Thinking that only its maker can read: it is left out."""

    type: Literal["redacted_thinking"]


AnyBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("item:text")]
            | Annotated[ToolUseBlock, Tag("item:tool_use")]
            | Annotated[ToolResultBlock, Tag("item:tool_result")]
            | Annotated[ThinkingBlock, Tag("item:thinking")]
            | Annotated[RedactedThinkingBlock, Tag("item:redacted_thinking")],
            Discriminator(
                item_tag, custom_error_type="block_type", custom_error_message="a block is an object with a type"
            ),
        ]
    ],
    Field(max_length=PARTS_MAX, fail_fast=True),
    only_parts(*_KINDS, refusal="blocks of type '{}' are not supported"),
    text_as("text", str | list[AnyBlock]),
]


class TurnMessage(BaseModel):
    """A message of one side."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "assistant"]
    content: Blocks


def conversation(system: Iterable[TextBlock], messages: Iterable[TurnMessage]) -> tuple[ChatMessage, ...]:
    """The messages as nodes take them: each result of a tool is a message of its own.

    Raises:
        InvalidValueError: a tool's result answers no use before it, or a block is on the wrong side.
    """
    instructions = joined(system)
    told = [ChatMessage(role="system", content=instructions)] if instructions else []
    used: dict[str, str] = {}
    for number, message in enumerate(messages):
        param = f"messages.{number}.content"
        if message.role == "assistant":
            answer = _answer(message.content, param)
            used |= {call.id: call.name for call in answer.tool_calls}
            told.append(answer)
        else:
            told += _of_user(message.content, used, param)
    return tuple(told)


def _answer(blocks: list[AnyBlock], param: str) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(ToolCall(id=block.id, name=block.name, arguments=json_text(block.input)))
        elif isinstance(block, ToolResultBlock):
            raise InvalidValueError(f"{param}: results of tools are messages of the user", param=param)
    reasoning = "".join(thoughts) if thoughts else None
    return ChatMessage(role="assistant", content=joined(texts), tool_calls=tuple(calls), reasoning=reasoning)


def _of_user(blocks: list[AnyBlock], used: dict[str, str], param: str) -> list[ChatMessage]:
    """Results of tools come before the text, whatever their order: they answer the message before."""
    results, texts = [], []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            name = used.get(block.tool_use_id)
            if name is None:
                raise InvalidValueError(f"{param}: there is no tool_use '{block.tool_use_id}' before", param=param)
            content = joined(block.content)
            results.append(ChatMessage(role="tool", content=content, name=name, tool_call_id=block.tool_use_id))
        else:
            raise InvalidValueError(f"{param}: '{block.type}' is what an assistant says", param=param)
    return results + ([ChatMessage(role="user", content=joined(texts))] if texts or not results else [])
