"""Input items of the Responses API: validated, written down as the objects that `input_items` lists, and read as a
conversation.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from controlplane.errors import InvalidValueError
from controlplane.serving.openai_fields import (
    PARTS_MAX,
    Text,
    item_tag,
    kind_of,
    only_parts,
    refuse_other_kinds,
    text_as,
)
from dataplane.protocol.messages import ChatMessage, ToolCall

CALL_ID_CHARACTERS_MAX = 128
ITEMS_MAX = 2048
_TEXT_PARTS = ("input_text", "output_text", "summary_text", "reasoning_text")
_INSTRUCTING = ("system", "developer")

Item = dict[str, Any]
"""An item as it is stored and listed: with an id, its content as a list of parts."""
CallId = Annotated[Text, Field(min_length=1, max_length=CALL_ID_CHARACTERS_MAX)]


class TextPart(BaseModel):
    """A part of a text; a refusal is one too. Annotations and log probabilities of an earlier answer's parts are
    ignored.
    """

    model_config = ConfigDict(extra="ignore")
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _refusal_is_text(cls, given: Any) -> Any:
        return {"type": "output_text", "text": given.get("refusal")} if kind_of(given) == "refusal" else given


Parts = Annotated[
    list[TextPart],
    Field(max_length=PARTS_MAX, fail_fast=True),
    only_parts(*_TEXT_PARTS, "refusal"),
    text_as("input_text", str | list[TextPart]),
]


def _joined(parts: Iterable[TextPart]) -> str:
    return "".join(part.text for part in parts)


class _ItemModel(BaseModel):
    """Fields of items that only the server sets, such as `id` and `status`, are ignored."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(_ItemModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    def written(self) -> Item:
        """The item as it is stored, without its id."""
        if self.role == "assistant":
            content = [output_text(part.text) for part in self.content]
        else:
            content = [{"type": "input_text", "text": part.text} for part in self.content]
        return {"type": "message", "status": "completed", "role": self.role, "content": content}


class FunctionCallItem(_ItemModel):
    """A call that the model made earlier. `arguments`: JSON text."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[Text, Field(min_length=1, max_length=128)]
    arguments: Text

    def written(self) -> Item:
        """The item as it is stored, without its id."""
        return {
            "type": "function_call",
            "status": "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionCallOutputItem(_ItemModel):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts

    def written(self) -> Item:
        """The item as it is stored, without its id."""
        return {
            "type": "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": _joined(self.output),
        }


class ReasoningItem(_ItemModel):
    """What the model thought earlier: its `content`, or a summary where that is missing."""

    type: Literal["reasoning"]
    summary: Parts = []
    content: Parts | None = None

    def written(self) -> Item:
        """The item as it is stored, without its id."""
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content or ()]
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary]
        return {"type": "reasoning", "status": "completed", "summary": summary, "content": content}


AnyItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _items(given: Any) -> Any:
    """A text as a message of the user. An item with a role and no type is a message; items of other kinds are refused
    by name.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    if len(given) > ITEMS_MAX:
        raise ValueError(f"at most {ITEMS_MAX} items, not {len(given)}")
    return [_item(each) for each in given]


def _item(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    item = {**given, "type": given.get("type") or ("message" if "role" in given else None)}
    refuse_other_kinds(item, _ID_PREFIXES, "items of type '{}' are not supported")
    return item


Input = Annotated[
    list[
        Annotated[
            Annotated[MessageItem, Tag("item:message")]
            | Annotated[FunctionCallItem, Tag("item:function_call")]
            | Annotated[FunctionCallOutputItem, Tag("item:function_call_output")]
            | Annotated[ReasoningItem, Tag("item:reasoning")],
            Discriminator(
                item_tag,
                custom_error_type="item_type",
                custom_error_message="an item is an object with a type, or a message with a role",
            ),
        ]
    ],
    Field(min_length=1, max_length=ITEMS_MAX, fail_fast=True),
    BeforeValidator(_items, json_schema_input_type=str | list[AnyItem]),
]


def output_text(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A part of an answer's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def item_id(kind: str, response_id: str, name: str) -> str:
    """The id of an item; `name` tells it from others of its response."""
    return f"{_ID_PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{name}"


def written(items: Iterable[AnyItem], response_id: str) -> list[Item]:
    """The input items of a response as they are stored."""
    listed = []
    for number, item in enumerate(items):
        stored = item.written()
        listed.append({"id": item_id(stored["type"], response_id, f"in{number}"), **stored})
    return listed


def conversation(instructions: str | None, items: Iterable[Item]) -> tuple[ChatMessage, ...]:
    """The messages that items stand for: reasoning, text and calls of one turn of the assistant are one message, and so
    are instructions that follow each other, since many chat templates take one system message, the first.

    Raises:
        InvalidValueError: a function's output answers no call before it.
    """
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    called: dict[str, str] = {}
    for item in items:
        if item["type"] == "function_call":
            called[item["call_id"]] = item["name"]
        message = _message(item, called)
        if messages and _continues(messages[-1], message):
            messages[-1] = _merged(messages[-1], message)
        else:
            messages.append(message)
    return tuple(messages)


def _message(item: Item, called: dict[str, str]) -> ChatMessage:
    kind = item["type"]
    if kind == "function_call":
        call = ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"])
        return ChatMessage(role="assistant", tool_calls=(call,))
    if kind == "function_call_output":
        name = called.get(item["call_id"])
        if name is None:
            raise InvalidValueError(f"input: no function call has the call_id '{item['call_id']}'", param="input")
        return ChatMessage(role="tool", content=item["output"], name=name, tool_call_id=item["call_id"])
    if kind == "reasoning":
        parts = item["content"] or item["summary"]
        return ChatMessage(role="assistant", reasoning="".join(part["text"] for part in parts))
    text = "".join(part["text"] for part in item["content"])
    return ChatMessage(role="system" if item["role"] in _INSTRUCTING else item["role"], content=text)


def _continues(last: ChatMessage, new: ChatMessage) -> bool:
    """Whether both are instructions, or of one turn, in which reasoning precedes text and text precedes calls."""
    if last.role == new.role == "system":
        return True
    if last.role != "assistant" or new.role != "assistant":
        return False
    if new.tool_calls:
        return True
    began = bool(last.content or last.tool_calls)
    return not began and not (new.reasoning is not None and last.reasoning is not None)


def _merged(last: ChatMessage, new: ChatMessage) -> ChatMessage:
    if new.role == "system":
        return ChatMessage(role="system", content=f"{last.content}\n\n{new.content}")
    return ChatMessage(
        role="assistant",
        content=last.content + new.content,
        tool_calls=last.tool_calls + new.tool_calls,
        reasoning=last.reasoning if new.reasoning is None else new.reasoning,
    )
