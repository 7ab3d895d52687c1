"""Tools of the Responses API: functions, and which of them the model may or must call. Hosted tools are refused."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from controlplane.serving.openai_fields import FunctionName, JsonObject, Text, refuse_other_kinds
from controlplane.serving.tools import TOOLS_MAX, only_tools, tool_use
from dataplane.protocol.messages import Tool, ToolUse

_CHOICES = ("function", "allowed_tools")


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
    list[Annotated[FunctionTool, only_tools("function")]] | None, Field(None, max_length=TOOLS_MAX, fail_fast=True)
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
    tools: list[Annotated[FunctionRef, only_tools("function")]] = Field([], max_length=TOOLS_MAX, fail_fast=True)

    def echoed(self) -> Any:
        """The choice as the response repeats it."""
        if self.type == "function":
            return {"type": "function", "name": self.name}
        if self.type == "allowed_tools":
            return {"type": self.type, "mode": self.mode, "tools": [each.model_dump() for each in self.tools]}
        return self.type

    def among(self, tools: Sequence[FunctionTool], *, parallel: bool) -> ToolUse | None:
        """The tools of a request as nodes take them; raises as `tool_use` does."""
        given = [tool.tool() for tool in tools]
        if self.type == "function":
            return tool_use(given, "named", names=[self.name], parallel=parallel)
        if self.type == "allowed_tools":
            return tool_use(given, self.mode, names=[each.name for each in self.tools], parallel=parallel)
        return tool_use(given, self.type, parallel=parallel)


def _as_choice(given: Any) -> Any:
    if isinstance(given, str):
        return {"type": given}
    refuse_other_kinds(given, _CHOICES, "choices of type '{}' are not supported, only functions")
    return given


ToolChoiceField = Annotated[
    ToolChoice, BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice)
]
