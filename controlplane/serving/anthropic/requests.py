"""`POST /v1/messages`: its body, validated, as the message that nodes take."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from controlplane.errors import InvalidValueError
from controlplane.serving.anthropic.blocks import Texts, TurnMessage, conversation
from controlplane.serving.openai_fields import JsonObject, RequestBody, Text, fault, neutral, only
from controlplane.serving.openai_formats import schema_constraint
from controlplane.serving.openai_messages import MESSAGES_MAX
from controlplane.serving.openai_requests import tier_of
from controlplane.serving.query import Query
from controlplane.serving.tools import TOOLS_MAX, Choice, only_tools, tool_use
from dataplane.protocol.limits import TOP_K_MAX
from dataplane.protocol.messages import Generate, Sampling, Tokenize, Tool, ToolUse
from dataplane.protocol.tiers import Tier

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
STOP_SEQUENCES_MAX = 16
_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


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


class MessagesPrompt(RequestBody):
    """What the prompt is made of."""

    messages: list[TurnMessage] = Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    system: Texts = Field([])
    tools: list[Annotated[CustomTool, only_tools("custom")]] = Field([], max_length=TOOLS_MAX, fail_fast=True)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: dict[str, Any] | None = Field(None, description="ignored: prefixes are cached by themselves")

    def prompt_fields(self) -> dict[str, Any]:
        """The fields of `Generate` that the prompt is made of.

        Raises:
            InvalidValueError: messages do not fit together.
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

    @model_validator(mode="after")
    def _tools_fit_together(self) -> "MessagesPrompt":
        self._tool_use()
        return self

    def _tool_use(self) -> ToolUse | None:
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        if choice.type == "any" and not self.tools:
            raise fault("tool_choice", "'any' needs tools")
        return tool_use(
            [tool.tool() for tool in self.tools],
            _CHOICES[choice.type],
            names=None if choice.name is None else [choice.name],
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
    stop_sequences: list[Text] = Field([], max_length=STOP_SEQUENCES_MAX, fail_fast=True)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=TOP_K_MAX)
    stream: bool = False
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only", "default", "priority", "flex"] | None = Field(
        None, description="extension: the names of OpenAI's API too"
    )
    container: Annotated[SkipJsonSchema[None], neutral("containers are not supported")] = None
    mcp_servers: Annotated[SkipJsonSchema[None], neutral("MCP servers are not supported", [])] = None
    context_management: Annotated[SkipJsonSchema[None], neutral("the context is never edited")] = None
    inference_geo: Annotated[SkipJsonSchema[None], neutral("x-tidepool-region names the region")] = None
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
