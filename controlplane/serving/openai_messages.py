"""The messages of a conversation, and the tools that it may use, as chat completions spell them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from controlplane.serving.openai_fields import (
    PARTS_MAX,
    FunctionName,
    JsonObject,
    NoFunctions,
    Text,
    fault,
    item_tag,
    kind_of,
    only_parts,
    refuse_other_kinds,
)
from controlplane.serving.tools import TOOLS_MAX, only_tools, tool_use
from dataplane.protocol.messages import ChatMessage, Tool, ToolCall, ToolUse

MESSAGES_MAX, TOOL_CALLS_MAX = 2048, 128


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """The function of a tool call. `arguments`: JSON text, as the model wrote it."""

    model_config = ConfigDict(extra="ignore")
    name: FunctionName
    arguments: Text


class AssistantToolCall(BaseModel):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")
    id: Text = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a conversation. `reasoning_content`: what the assistant thought before its content."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(max_length=PARTS_MAX, fail_fast=True)] | None, only_parts("text")
    ] = None
    name: Annotated[Text, Field(max_length=256)] | None = None
    tool_calls: (
        Annotated[
            list[Annotated[AssistantToolCall, only_tools("function")]],
            Field(max_length=TOOL_CALLS_MAX, fail_fast=True),
        ]
        | None
    ) = None
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    function_call: NoFunctions = None

    def flattened(self) -> ChatMessage:
        """The message as plain text; older chat templates call `developer` `system`."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else str(self.content or "")
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=text,
            name=self.name,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning_content,
        )


Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


def check_conversation(messages: Sequence[Message]) -> None:
    """Accept messages whose tool results answer calls that precede them.

    Raises:
        PydanticCustomError: a message does not fit its role; the error names it.
    """
    calls: set[str] = set()
    for number, message in enumerate(messages):
        if message.tool_calls:
            if message.role != "assistant":
                raise fault(
                    f"messages.{number}.tool_calls", "only messages of the role 'assistant' may have tool calls"
                )
            calls |= {call.id for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id not in calls:
            given = "is missing" if message.tool_call_id is None else f"'{message.tool_call_id[:80]}' is unknown"
            raise fault(
                f"messages.{number}.tool_call_id",
                f"{given}: a message of the role 'tool' names the id of a tool call in a message before it",
            )


class Function(BaseModel):
    """A function that the model may call. `parameters`: the JSON schema of its arguments."""

    model_config = ConfigDict(extra="forbid")
    name: FunctionName
    description: Annotated[Text, Field(max_length=16_384)] | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="the arguments of every call match the schema")

    def tool(self) -> Tool:
        """The tool as nodes take it."""
        return Tool(name=self.name, description=self.description, parameters=self.parameters, strict=bool(self.strict))


class FunctionTool(BaseModel):
    """A tool; only functions are supported."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: Function


Tools = Annotated[
    list[Annotated[FunctionTool, only_tools("function")]],
    Field(
        max_length=TOOLS_MAX, fail_fast=True, description=f"at most {TOOLS_MAX} functions, each with a name of its own"
    ),
]


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="ignore")
    name: FunctionName


class NamedTool(BaseModel):
    """The choice of one function."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    """The choice among some of the tools."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=TOOLS_MAX, fail_fast=True)]


class AllowedToolChoice(BaseModel):
    """The choice among some of the tools, as OpenAI wraps it."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_tag(value: Any) -> str:
    return item_tag(value) or "item:word"


def _known_choice(value: Any) -> Any:
    """Refuse what is no choice at all, in one message instead of one for each alternative."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    refuse_other_kinds(value, ("function", "allowed_tools"), "only tools of type 'function' are supported, not '{}'")
    if kind_of(value) is None:
        raise ValueError("'none', 'auto', 'required', or an object that names a function")
    return value


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("item:word")]
    | Annotated[NamedTool, Tag("item:function")]
    | Annotated[AllowedToolChoice, Tag("item:allowed_tools")],
    Discriminator(_choice_tag),
    BeforeValidator(_known_choice),
]


def chat_tools(tools: Sequence[FunctionTool], choice: Any, *, parallel: bool) -> ToolUse | None:
    """The tools of a request as nodes take them; raises as `tool_use` does."""
    if not tools and choice in (None, "none", "auto"):
        return None
    mode: Any = choice if isinstance(choice, str) else "auto"
    names: list[str | None] | None = None
    if isinstance(choice, NamedTool):
        mode, names = "named", [choice.function.name]
    elif isinstance(choice, AllowedToolChoice):
        mode, names = choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
    return tool_use([tool.function.tool() for tool in tools], mode, names=names, parallel=parallel)
