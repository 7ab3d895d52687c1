"""OpenAI's request bodies, checked and turned into what the fleet understands, for gateway and dispatcher."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from controlplane.errors import ContextLengthError, InvalidValueError
from controlplane.policies.facts import Tier
from controlplane.serving.send import Outgoing
from controlplane.store.tables import Model
from dataplane.messages import ChatMessage, Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older endpoint

_UNION_BRANCH = re.compile(r"str|int|function-\w+\[.*\]|list\[.*\]|constrained-\w+|nullable\[.*\]")
ServiceTier = Literal["auto", "default", "priority", "flex"]
_TIERS: dict[str | None, Tier] = {"priority": Tier.IW_F, "flex": Tier.NIW}
_SERVED_AS = {Tier.IW_F: "priority", Tier.IW_N: "default", Tier.NIW: "flex"}


def _valid_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and cannot be sent on."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]
Stop = Text | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=4)] | None


class TextPart(BaseModel):
    """A part of a message's content; text is what these models read."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: str | None = None

    def flattened(self) -> ChatMessage:
        """The turn as plain text; `developer` is what older templates call `system`."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else str(self.content or "")
        return ChatMessage(role="system" if self.role == "developer" else self.role, content=text)


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(BaseModel):
    """The only response format these engines make."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class GenerationRequest(BaseModel, ABC):
    """What both endpoints share. Fields of OpenAI's that change nothing here are taken at their neutral value only, so
    that nobody believes in a penalty or a tool that was never applied.
    """

    model_config = ConfigDict(extra="forbid")
    model: Text = Field(min_length=1, max_length=200)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: Literal[1] | None = None
    stop: Stop = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    ignore_eos: bool = Field(False, description="extension: run to max_tokens, for load tests")

    @model_validator(mode="after")
    def _options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @abstractmethod
    def tokens_max(self) -> int | None:
        """The most tokens to make; None: as many as fit."""

    @abstractmethod
    def prompt_fields(self) -> dict[str, Any]:
        """The prompt, in the field of `Outgoing` that it belongs to."""

    def tier(self) -> Tier:
        """The tier this asks for."""
        return _TIERS.get(self.service_tier, Tier.IW_N)

    def sampling(self) -> Sampling:
        """How to choose tokens."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=self.tokens_max(),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=tuple(stop for stop in stops if stop),
            ignore_eos=self.ignore_eos,
        )


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=2048)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: TextFormat | None = None
    logprobs: Literal[False] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None

    def tokens_max(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def prompt_fields(self) -> dict[str, Any]:
        """The conversation."""
        return {"messages": tuple(message.flattened() for message in self.messages)}


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)] | Annotated[list[int], Field(min_length=1)]
    max_tokens: int | None = Field(COMPLETION_MAX_TOKENS, ge=1)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None
    suffix: None = None

    def tokens_max(self) -> int | None:
        """OpenAI's default is 16 here."""
        return self.max_tokens

    def prompt_fields(self) -> dict[str, Any]:
        """Text, or token ids."""
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        if isinstance(self.prompt[0], str):
            return {"prompt": self.prompt[0]}
        return {"prompt_tokens": tuple(self.prompt)}


REQUESTS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
AnyRequest = ChatRequest | CompletionRequest


def served_as(tier: Tier) -> str:
    """The `service_tier` that names a tier on the wire."""
    return _SERVED_AS[tier]


def parse_json(endpoint: str, body: bytes) -> AnyRequest:
    """A batch line's body, JSON that was not decoded, as the endpoint's request.

    Raises:
        InvalidValueError: it is not one; the message names the field.
    """
    try:
        return REQUESTS[endpoint].model_validate_json(body)
    except ValidationError as error:
        raise first_fault(error.errors()[0]) from error


def first_fault(fault: Mapping[str, Any]) -> InvalidValueError:
    """A validation error of pydantic's as ours. `loc` is the path to the field; the names of a union's branches, which
    pydantic mixes in, are left out.
    """
    path = [str(part) for part in fault["loc"] if not _UNION_BRANCH.fullmatch(str(part))]
    field = ".".join(path).encode(errors="replace").decode() or None
    message = str(fault["msg"]).removeprefix("Value error, ").encode(errors="replace").decode()
    return InvalidValueError(f"{field}: {message}" if field else message, param=field)


def check_context(request: AnyRequest, model: Model) -> None:
    """Let a request pass that may fit the model.

    Raises:
        ContextLengthError: `max_tokens` alone is beyond the model's context.
    """
    tokens_max = request.tokens_max()
    if tokens_max is not None and tokens_max >= model.context_tokens:
        raise ContextLengthError(
            f"max_tokens {tokens_max} leaves no room for a prompt: the context of '{model.name}' is"
            f" {model.context_tokens} tokens",
            param="max_tokens",
        )


def to_outgoing(
    request: AnyRequest,
    model: Model,
    *,
    request_id: str,
    tier: Tier,
    origin: str | None,
    only_region: str | None = None,
) -> Outgoing:
    """The request as the fleet understands it; raises as `check_context` does."""
    check_context(request, model)
    return Outgoing(
        request_id=request_id,
        model=model,
        tier=tier,
        origin=origin,
        sampling=request.sampling(),
        only_region=only_region,
        **request.prompt_fields(),
    )
