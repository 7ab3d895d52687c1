"""OpenAI's request bodies: validated, and turned into the messages that nodes take, for gateway and dispatcher."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from controlplane.errors import InvalidValueError, UnknownParameterError, UnsupportedParameterError
from controlplane.serving.openai_fields import (
    ONE_PROMPT,
    TEXT_PARTS_ONLY,
    UNSUPPORTED,
    NeutralChatFields,
    NeutralCompletionFields,
    NeutralFields,
    NoTools,
    Stop,
    Text,
    unsupported,
)
from controlplane.serving.query import Query
from dataplane.protocol.messages import ChatMessage, Generate, Sampling
from dataplane.protocol.tiers import Tier

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older endpoint

_UNION_BRANCH = re.compile(r"str|int|function-\w+\[.*\]|list\[.*\]|constrained-\w+|nullable\[.*\]|item:\w+")
ServiceTier = Literal["auto", "default", "priority", "flex"]
_TIERS: dict[str | None, Tier] = {"priority": Tier.IW_F, "flex": Tier.NIW}
_SERVED_AS = {Tier.IW_F: "priority", Tier.IW_N: "default", Tier.NIW: "flex"}


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | list[TextPart] | None, TEXT_PARTS_ONLY] = None
    name: str | None = None
    tool_calls: NoTools = None
    function_call: NoTools = None

    def flattened(self) -> ChatMessage:
        """The message as plain text; older chat templates call `developer` `system`."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else str(self.content or "")
        return ChatMessage(role="system" if self.role == "developer" else self.role, content=text)


class StreamOptions(BaseModel):
    """What a stream has in addition to its text. Other options are ignored; `x-tidepool-warning` names them."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="ignored: nothing is padded")

    def ignored(self) -> list[str]:
        """Names of the unknown options that are set."""
        return sorted(name for name, value in (self.__pydantic_extra__ or {}).items() if value)


class GenerationRequest(NeutralFields, ABC):
    """The fields of both endpoints. A field that is null counts as absent, even an unknown one."""

    model_config = ConfigDict(extra="forbid")
    model: Text = Field(min_length=1, max_length=200)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Stop = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="extension: share cached prefixes only where it is the same"
    )
    ignore_eos: bool | None = Field(None, description="extension: run to max_tokens, for load tests")
    min_tokens: int | None = Field(None, ge=0, description="extension: over 0 only with ignore_eos and max_tokens")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given

    @model_validator(mode="after")
    def _options_need_stream(self) -> "GenerationRequest":
        if not self.stream and self.stream_options is not None and any(dict(self.stream_options).values()):
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @model_validator(mode="after")
    def _fewest_tokens_are_all(self) -> "GenerationRequest":
        if self.min_tokens and not (self.ignore_eos and self.min_tokens <= (self.tokens_max() or 0)):
            raise unsupported("min_tokens is not supported yet, but with ignore_eos and at most max_tokens")
        return self

    @abstractmethod
    def tokens_max(self) -> int | None:
        """The most tokens to generate; None: as many as fit."""

    @abstractmethod
    def prompt_fields(self) -> dict[str, Any]:
        """The prompt, in the field of `Generate` that it belongs to."""

    def query(self, *, tier: Tier) -> Query:
        """The request as nodes take it, for instances that are still to be chosen."""
        message = Generate(
            request_id="",
            instance_id="",
            model=self.model,
            tier=tier,
            sampling=self.sampling(),
            cache_salt=self.cache_salt or "",
            **self.prompt_fields(),
        )
        return Query(prompts=(message,), prompt_cache_key=self.prompt_cache_key or "")

    def tier(self) -> Tier:
        return tier_of(self.service_tier)

    def sampling(self) -> Sampling:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=self.tokens_max(),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=tuple(stop for stop in stops if stop),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(NeutralChatFields, GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=2048)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    store: bool | None = None
    metadata: dict[str, str] | None = None

    def tokens_max(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def prompt_fields(self) -> dict[str, Any]:
        return {"messages": tuple(message.flattened() for message in self.messages)}


class CompletionRequest(NeutralCompletionFields, GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Text | Annotated[list[Text], Field(min_length=1, max_length=1)] | Annotated[list[int], Field(min_length=1)],
        ONE_PROMPT,
    ]
    max_tokens: int | None = Field(COMPLETION_MAX_TOKENS, ge=1)

    def tokens_max(self) -> int | None:
        return self.max_tokens

    def prompt_fields(self) -> dict[str, Any]:
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        if isinstance(self.prompt[0], str):
            return {"prompt": self.prompt[0]}
        return {"prompt_tokens": tuple(self.prompt)}


AnyRequest = ChatRequest | CompletionRequest


def tier_of(service_tier: str | None) -> Tier:
    """The tier that a `service_tier` asks for."""
    return _TIERS.get(service_tier, Tier.IW_N)


def served_as(tier: Tier) -> str:
    """The `service_tier` that names a tier on the wire."""
    return _SERVED_AS[tier]


def first_fault(fault: Mapping[str, Any]) -> InvalidValueError:
    """A validation error of pydantic as one of this API. `loc` is the path to the field, without the names of union
    branches that pydantic inserts.
    """
    path = [str(part) for part in fault["loc"] if not _UNION_BRANCH.fullmatch(str(part))]
    field = ".".join(path).encode(errors="replace").decode() or None
    if fault["type"] == "extra_forbidden":
        return UnknownParameterError(f"{field}: there is no such field", param=field)
    message = str(fault["msg"]).removeprefix("Value error, ").encode(errors="replace").decode()
    kind = UnsupportedParameterError if fault["type"] == UNSUPPORTED else InvalidValueError
    return kind(f"{field}: {message}" if field else message, param=field)
