"""Tools of the Responses API: functions, and which of them the model may or must call. Hosted tools are refused."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from controlplane.errors import InvalidValueError
from controlplane.serving.openai_fields import FUNCTION_NAME, JsonObject, Text, unsupported
from dataplane.protocol.messages import Tool, ToolUse

TOOLS_MAX = 128
_OPTIONS = ("none", "auto", "required")
_CHOICES = ("function", "allowed_tools")

FunctionName = Annotated[Text, Field(pattern=FUNCTION_NAME)]


def _function_only(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"tools of type '{kind[:40]}' are not supported: nothing runs on this side, only functions")
    return given


class FunctionTool(BaseModel):
    """A function that the client runs."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The tool as nodes take it."""
        return Tool(name=self.name, description=self.description, parameters=self.parameters, strict=bool(self.strict))

    def echoed(self) -> dict[str, Any]:
        """The tool as the response repeats it."""
        return {**self.model_dump(), "strict": bool(self.strict)}


Tools = Annotated[
    list[Annotated[FunctionTool, BeforeValidator(_function_only)]] | None, Field(None, max_length=TOOLS_MAX)
]


class FunctionRef(BaseModel):
    """A function by its name."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    name: Text


class ToolChoice(BaseModel):
    """`type` `auto`, `none` and `required` are also written as plain words."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["auto", "none", "required", "function", "allowed_tools"]
    name: Text | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[Annotated[FunctionRef, BeforeValidator(_function_only)]] = Field([], max_length=TOOLS_MAX)

    def echoed(self) -> Any:
        """The choice as the response repeats it."""
        if self.type == "function":
            return {"type": "function", "name": self.name}
        if self.type == "allowed_tools":
            return {"type": self.type, "mode": self.mode, "tools": [each.model_dump() for each in self.tools]}
        return self.type


def _as_choice(given: Any) -> Any:
    if isinstance(given, str):
        return {"type": given}
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in _CHOICES:
        raise unsupported(f"choices of type '{kind[:40]}' are not supported, only functions")
    return given


ToolChoiceField = Annotated[
    ToolChoice, BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice)
]


def tool_use(tools: list[FunctionTool], choice: ToolChoice, *, parallel: bool) -> ToolUse | None:
    """The tools of a request as nodes take them; None: it has none.

    Raises:
        InvalidValueError: two tools have one name, or the choice names none of them.
    """
    twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    if twice:
        raise InvalidValueError(f"tools: several have the name '{twice[0]}'", param="tools")
    names = {tool.name for tool in tools}
    asked = [choice.name] if choice.type == "function" else [each.name for each in choice.tools]
    for name in asked:
        if name not in names:
            raise InvalidValueError(f"tool_choice: there is no tool '{name}' in tools", param="tool_choice")
    if not tools:
        if choice.type in {"required", "allowed_tools"}:
            raise InvalidValueError(f"tool_choice: '{choice.type}' needs tools", param="tool_choice")
        return None
    if choice.type == "allowed_tools":
        tools = [tool for tool in tools if tool.name in asked]
        return _use(tools, choice.mode if tools else "none", None, parallel=parallel)
    if choice.type == "function":
        return _use(tools, "named", choice.name, parallel=parallel)
    return _use(tools, choice.type, None, parallel=parallel)


def _use(
    tools: list[FunctionTool],
    choice: Literal["auto", "none", "required", "named"],
    name: str | None,
    *,
    parallel: bool,
) -> ToolUse:
    return ToolUse(tools=tuple(tool.tool() for tool in tools), choice=choice, name=name, parallel=parallel)
