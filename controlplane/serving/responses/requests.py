"""`POST /v1/responses`: its body, validated, as the message that nodes take and as the head of its response."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from controlplane.serving.openai_fields import (
    FunctionName,
    JsonObject,
    Metadata,
    ReasoningEffort,
    RequestBody,
    Text,
    effort_variables,
    fault,
    neutral,
    only,
    unsupported,
)
from controlplane.serving.openai_formats import schema_constraint
from controlplane.serving.openai_requests import served_as, tier_of
from controlplane.serving.query import Query
from controlplane.serving.responses.items import Input, Item, conversation, written
from controlplane.serving.responses.tools import ToolChoice, ToolChoiceField, Tools
from dataplane.protocol.limits import LOGPROBS_MAX, TEMPERATURE_MAX
from dataplane.protocol.messages import Constraint, Generate, Sampling, ToolUse
from dataplane.protocol.tiers import Tier

RESPONSES = "/v1/responses"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED_MAX = 16
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")


class TextFormat(BaseModel):
    """What the text of the answer is. `schema` of `json_schema`: a JSON schema that it always matches."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: FunctionName | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_has_name(self) -> "TextFormat":
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("json_schema needs a name and a schema")
        return self

    def constraint(self) -> Constraint | None:
        """The constraint as nodes take it; None: any text."""
        if self.type == "json_schema":
            return schema_constraint(self.schema_ or {})
        return Constraint(kind="json_object") if self.type == "json_object" else None

    def echoed(self) -> dict[str, Any]:
        """The format as the response repeats it."""
        return self.model_dump() if self.type == "json_schema" else {"type": self.type}


class TextConfig(BaseModel):
    """How the text of the answer shall be."""

    model_config = ConfigDict(extra="forbid")
    format: TextFormat = TextFormat()
    verbosity: Annotated[Literal["medium"] | None, only("verbosity cannot be set", "medium")] = None


class ReasoningConfig(BaseModel):
    """How the model shall think. `effort` goes to its chat template, which may ignore it; the reasoning itself is in
    the answer, and is not summarized.
    """

    model_config = ConfigDict(extra="forbid")
    effort: ReasoningEffort | None = None
    summary: Annotated[Literal["auto"] | None, only("reasoning is not summarized", "auto")] = None
    generate_summary: Annotated[Literal["auto"] | None, only("reasoning is not summarized", "auto")] = None


class ResponseStreamOptions(BaseModel):
    """Nothing is padded, so there is nothing to leave out."""

    model_config = ConfigDict(extra="forbid")
    include_obfuscation: bool | None = Field(None, description="ignored: nothing is padded")


class RefusedFields(BaseModel):
    """Fields of OpenAI's that ask for what is not here. The OpenAPI document leaves them out."""

    conversation: Annotated[
        SkipJsonSchema[None], neutral("conversations are not supported; previous_response_id is")
    ] = None
    prompt: Annotated[SkipJsonSchema[None], neutral("prompts by id are not supported")] = None
    moderation: Annotated[SkipJsonSchema[None], neutral("moderation is not supported")] = None
    context_management: Annotated[SkipJsonSchema[None], neutral("the context is never compacted")] = None
    access_programs: Annotated[SkipJsonSchema[None], neutral("access programs are not supported")] = None
    image: Annotated[SkipJsonSchema[None], neutral("only text is supported")] = None
    prompt_cache_options: Annotated[SkipJsonSchema[None], neutral("how long prefixes are cached cannot be set")] = None


class ResponseRequest(RefusedFields, RequestBody):
    """`POST /v1/responses`."""

    input: Input
    instructions: Text | None = None
    previous_response_id: Text | None = Field(None, max_length=128)
    tools: Tools
    tool_choice: ToolChoiceField = Field(default_factory=lambda: ToolChoice(type="auto"))
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = Field(None, ge=1, description="of hosted tools, of which there are none")
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    temperature: float | None = Field(None, ge=0, le=TEMPERATURE_MAX)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=LOGPROBS_MAX)
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[Annotated[Text, only("there is nothing of this kind to include", *_INCLUDABLE)]] = Field(
        [], max_length=_INCLUDED_MAX, fail_fast=True
    )
    metadata: Metadata = {}
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    background: bool = Field(False, description="answer at once, and run on; needs store, and no stream")
    truncation: Annotated[Literal["disabled"], only("prompts are never cut", "disabled")] = "disabled"
    service_tier: Literal["auto", "default", "priority", "fast", "flex"] | None = None
    user: Text | None = Field(None, max_length=512)
    safety_identifier: Text | None = Field(None, max_length=512)
    prompt_cache_key: Text | None = Field(None, max_length=512)
    prompt_cache_retention: Annotated[
        SkipJsonSchema[Literal["in_memory"] | None], only("prefixes are kept as long as there is memory", "in_memory")
    ] = None

    @model_validator(mode="after")
    def _background_is_retrieved(self) -> "ResponseRequest":
        if self.background and not self.store:
            raise fault("background", "a response in the background is retrieved, so it needs store")
        if self.background and self.stream:
            raise unsupported("a response in the background is not streamed", field="background")
        return self

    @model_validator(mode="after")
    def _tools_fit_together(self) -> "ResponseRequest":
        self._tools()
        return self

    def _tools(self) -> ToolUse | None:
        return self.tool_choice.among(self.tools or [], parallel=self.parallel_tool_calls)

    def tier(self) -> Tier:
        """The tier that `service_tier` asks for."""
        return tier_of("priority" if self.service_tier == "fast" else self.service_tier)

    def tokens_max(self) -> int | None:
        """The most tokens of the answer; None: as many as fit."""
        return self.max_output_tokens

    def query(self, *, tier: Tier, earlier: Sequence[Item] = ()) -> Query:
        """The request as nodes take it, with the response object before its answer as options. `earlier`: the items of
        the previous responses.

        Raises:
            InvalidValueError: an item answers no call.
        """
        message = Generate(
            request_id="",
            instance_id="",
            model=self.model,
            tier=tier,
            messages=conversation(self.instructions, [*earlier, *written(self.input, "")]),
            sampling=self.sampling(),
            tools=self._tools(),
            constraint=self.text.format.constraint(),
            template=effort_variables(self.reasoning.effort),
        )
        return Query(
            prompts=(message,),
            prompt_cache_key=self.prompt_cache_key or "",
            options=self.head(tier),
            input_field="input",
        )

    def sampling(self) -> Sampling:
        """How to choose tokens."""
        wants_logprobs = self.top_logprobs is not None or _LOGPROBS in self.include
        return Sampling(
            max_tokens=self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
        )

    def head(self, tier: Tier) -> dict[str, Any]:
        """The response object before its answer, without its id and the time of its creation."""
        return {
            "object": "response",
            "completed_at": None,
            "status": "in_progress",
            "background": self.background,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": served_as(tier),
            "store": self.store,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": self.text.format.echoed(), "verbosity": "medium"},
            "tool_choice": self.tool_choice.echoed(),
            "tools": [tool.echoed() for tool in self.tools or []],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation,
            "usage": None,
            "user": self.user,
        }


class BatchedResponseRequest(ResponseRequest):
    """A response as a line of a batch: it is in the batch's output file alone, and continues no other."""

    @model_validator(mode="after")
    def _stands_alone(self) -> "BatchedResponseRequest":
        for name in ("previous_response_id", "background"):
            if getattr(self, name):
                raise unsupported("a response in a batch stands alone, and is not stored", field=name)
        return self

    def head(self, tier: Tier) -> dict[str, Any]:
        """The response object before its answer; it says that it is not stored."""
        return {**super().head(tier), "store": False}
