"""`POST /v1/messages`: its body, validated, as the message that nodes take."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from controlplane.errors import InvalidValueError
from controlplane.serving.anthropic.blocks import Texts, TurnMessage, conversation
from controlplane.serving.openai_fields import JsonObject, Text, only, unsupported
from controlplane.serving.openai_formats import schema_constraint
from controlplane.serving.openai_requests import tier_of
from controlplane.serving.query import Query
from dataplane.protocol.messages import Generate, Sampling, Tokenize, Tool, ToolUse
from dataplane.protocol.tiers import Tier

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
MESSAGES_MAX, TOOLS_MAX, STOP_SEQUENCES_MAX = 2048, 128, 16
_CHOICES: dict[str, Literal["auto", "none", "required", "named"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


def _own_tools_only(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise unsupported(f"tools of type '{kind[:40]}' are not supported: nothing runs on this side")
    return given


class CustomTool(BaseModel):
    """A tool that the client runs. `input_schema`: a JSON schema."""

    model_config = ConfigDict(extra="ignore")
    name: Annotated[Text, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def tool(self) -> Tool:
        """The tool as nodes take it."""
        return Tool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=bool(self.strict)
        )


class AnthropicToolChoice(BaseModel):
    """Which tools the model may or must use."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _tool_has_name(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type 'tool', and only to it")
        return self


class Thinking(BaseModel):
    """Whether the model shall think, which its chat template may ignore. `max_tokens` counts thinking too, so that
    `budget_tokens` is ignored.
    """

    model_config = ConfigDict(extra="forbid")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Annotated[Literal["summarized"] | None, only("thinking is shown in full", "summarized")] = None


class OutputFormat(BaseModel):
    """A JSON schema that the text of the answer matches."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(BaseModel):
    """How the answer shall be. `effort` goes to the chat template, which may ignore it."""

    model_config = ConfigDict(extra="forbid")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(BaseModel):
    """Who asks, as the client knows him."""

    model_config = ConfigDict(extra="forbid")
    user_id: Text | None = Field(None, max_length=512)


class MessagesPrompt(BaseModel):
    """What the prompt is made of. A field that is null counts as absent, even an unknown one."""

    model_config = ConfigDict(extra="forbid")
    model: Text = Field(min_length=1, max_length=200)
    messages: list[TurnMessage] = Field(min_length=1, max_length=MESSAGES_MAX)
    system: Texts = []
    tools: list[Annotated[CustomTool, BeforeValidator(_own_tools_only)]] = Field([], max_length=TOOLS_MAX)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: dict[str, Any] | None = Field(None, description="ignored: prefixes are cached by themselves")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given

    def prompt_fields(self) -> dict[str, Any]:
        """The fields of `Generate` that the prompt is made of.

        Raises:
            InvalidValueError: messages, tools or the choice of them do not fit together.
        """
        if self.messages[-1].role == "assistant":
            raise InvalidValueError(
                "messages: the last message must be the user's; an answer cannot be continued", param="messages"
            )
        return {
            "messages": conversation(self.system, self.messages),
            "tools": self._tool_use(),
            "template": self._template(),
        }

    def question(self) -> Tokenize:
        """The question how many tokens the prompt has, for an instance that is still to be chosen.

        Raises:
            InvalidValueError: as `prompt_fields`.
        """
        fields = self.prompt_fields()
        uses: ToolUse | None = fields.pop("tools")
        tools = () if uses is None else uses.tools
        return Tokenize(instance_id="", model=self.model, tools=tools, special_tokens=False, **fields)

    def _tool_use(self) -> ToolUse | None:
        twice = [name for name, count in Counter(tool.name for tool in self.tools).items() if count > 1]
        if twice:
            raise InvalidValueError(f"tools: several have the name '{twice[0]}'", param="tools")
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        if choice.name is not None and choice.name not in {tool.name for tool in self.tools}:
            raise InvalidValueError(f"tool_choice: there is no tool '{choice.name}' in tools", param="tool_choice")
        if not self.tools:
            if choice.type == "any":
                raise InvalidValueError("tool_choice: 'any' needs tools", param="tool_choice")
            return None
        return ToolUse(
            tools=tuple(tool.tool() for tool in self.tools),
            choice=_CHOICES[choice.type],
            name=choice.name,
            parallel=not choice.disable_parallel_tool_use,
        )

    def _template(self) -> dict[str, Any]:
        template: dict[str, Any] = {}
        if self.thinking is not None:
            template["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config.effort is not None:
            template["reasoning_effort"] = self.output_config.effort
        return template


class MessagesRequest(MessagesPrompt):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Text] = Field([], max_length=STOP_SEQUENCES_MAX)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stream: bool = False
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only", "default", "priority", "flex"] | None = Field(
        None, description="extension: the names of OpenAI's API too"
    )
    container: Annotated[SkipJsonSchema[None], only("containers are not supported")] = None
    mcp_servers: Annotated[SkipJsonSchema[None], only("MCP servers are not supported", [])] = None
    context_management: Annotated[SkipJsonSchema[None], only("the context is never edited")] = None
    inference_geo: Annotated[SkipJsonSchema[None], only("x-tidepool-region names the region")] = None
    speed: Annotated[SkipJsonSchema[Literal["standard"] | None], only("service_tier is", "standard")] = None

    def tier(self) -> Tier:
        """The tier that `service_tier` asks for."""
        return tier_of(self.service_tier)

    def tokens_max(self) -> int | None:
        """The most tokens of the answer."""
        return self.max_tokens

    def query(self, *, tier: Tier) -> Query:
        """The request as nodes take it.

        Raises:
            InvalidValueError: as `prompt_fields`.
        """
        shape = self.output_config.format
        message = Generate(
            request_id="",
            instance_id="",
            model=self.model,
            tier=tier,
            sampling=self.sampling(),
            constraint=None if shape is None else schema_constraint(shape.schema_),
            **self.prompt_fields(),
        )
        return Query(prompts=(message,))

    def sampling(self) -> Sampling:
        """How to choose tokens."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            stop=tuple(stop for stop in self.stop_sequences if stop),
        )
