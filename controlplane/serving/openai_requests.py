"""OpenAI's request bodies: validated, and turned into the messages that nodes take, for gateway and dispatcher."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, model_validator

from controlplane.errors import InvalidValueError, UnknownParameterError, UnsupportedParameterError
from controlplane.serving.openai_fields import (
    TOKEN_ID_MAX,
    UNSUPPORTED,
    JsonObject,
    Metadata,
    NeutralChatFields,
    NeutralCompletionFields,
    NeutralFields,
    ReasoningEffort,
    RequestBody,
    Stop,
    Text,
    TokenId,
    effort_variables,
    fault,
    unsupported,
)
from controlplane.serving.openai_formats import (
    Choice,
    Pattern,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    choice_constraint,
    format_constraint,
    grammar_constraint,
    only_one,
    regex_constraint,
    schema_constraint,
)
from controlplane.serving.openai_messages import Messages, ToolChoice, Tools, chat_tools, check_conversation
from controlplane.serving.query import CHOICES_MAX, Query
from dataplane.protocol.limits import (
    LOGIT_BIAS_MAX,
    LOGIT_BIAS_TOKENS_MAX,
    LOGPROBS_MAX,
    PENALTY_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    SEED_MAX,
    SEED_MIN,
    TEMPERATURE_MAX,
    TOP_K_MAX,
    is_reserved,
)
from dataplane.protocol.messages import Constraint, Generate, Sampling, ToolUse
from dataplane.protocol.tiers import Tier

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older endpoint
N_MAX = 8
BEST_OF_MAX = 20
PROMPTS_MAX = 32

_UNION_BRANCH = re.compile(r"str|int|function-\w+\[.*\]|list\[.*\]|constrained-\w+|nullable\[.*\]|item:\w+")
_AS_GIVEN = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "ignore_eos",
        "min_tokens",
    }
)
"""Fields of sampling whose names and values nodes share."""
ServiceTier = Literal["auto", "default", "priority", "flex"]
_TIERS: dict[str | None, Tier] = {"priority": Tier.IW_F, "flex": Tier.NIW}
_SERVED_AS = {Tier.IW_F: "priority", Tier.IW_N: "default", Tier.NIW: "flex"}


class StreamOptions(BaseModel):
    """What a stream has in addition to its text. Other options are ignored; `x-tidepool-warning` names them."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="ignored: nothing is padded")

    def ignored(self) -> list[str]:
        """Names of the unknown options that are set."""
        return sorted(name for name, value in (self.__pydantic_extra__ or {}).items() if value)


def _token_ids(value: Any) -> Any:
    """Refuse biases whose keys are no token ids."""
    if isinstance(value, dict):
        for key in value:
            if not (isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) and int(key) <= TOKEN_ID_MAX):
                raise ValueError("keys are token ids: whole numbers as strings")
    return value


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-LOGIT_BIAS_MAX, le=LOGIT_BIAS_MAX)]],
    Field(max_length=LOGIT_BIAS_TOKENS_MAX),
    BeforeValidator(_token_ids),
]


class SamplingFields(BaseModel):
    """How tokens are chosen. Fields that only vLLM has are extensions."""

    temperature: float | None = Field(None, ge=0, le=TEMPERATURE_MAX)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, le=TOP_K_MAX, description="extension; 0 and -1: no limit")
    min_p: float | None = Field(None, ge=0, le=1, description="extension: of the likeliest token's probability")
    frequency_penalty: float | None = Field(None, ge=-PENALTY_MAX, le=PENALTY_MAX)
    presence_penalty: float | None = Field(None, ge=-PENALTY_MAX, le=PENALTY_MAX)
    repetition_penalty: float | None = Field(
        None, ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX, description="extension; 1: none"
    )
    logit_bias: LogitBias | None = Field(None, description="by token id, -100 to 100")
    seed: int | None = Field(None, ge=SEED_MIN, le=SEED_MAX)
    stop: Stop = None
    ignore_eos: bool | None = Field(None, description="extension: run to max_tokens, for load tests")
    min_tokens: int | None = Field(
        None, ge=0, le=TOKEN_ID_MAX, description="extension: no end before so many tokens, or before the context's"
    )

    def as_sampling(self, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """The fields as nodes take them; what is not given is left out of the message."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "top_k": max(0, self.top_k or 0) or None,
            "stop": tuple(stop for stop in stops if stop) or None,
            "logit_bias": tuple((int(token_id), bias) for token_id, bias in (self.logit_bias or {}).items()) or None,
        }
        given |= {name: getattr(self, name) for name in self.model_fields_set & _AS_GIVEN}
        return Sampling(**{name: value for name, value in given.items() if value is not None})


class ConstraintFields(BaseModel):
    """vLLM's ways to say what the answer must match; the `guided_` ones are older names."""

    structured_outputs: StructuredOutputs | None = Field(None, description="extension; at most one constraint")
    guided_json: Schema | None = Field(None, description="extension: structured_outputs.json")
    guided_regex: Pattern | None = Field(None, description="extension: structured_outputs.regex")
    guided_choice: Choice | None = Field(None, description="extension: structured_outputs.choice")
    guided_grammar: Pattern | None = Field(None, description="extension: structured_outputs.grammar")

    def constraints(self) -> dict[str, Constraint | None]:
        """What each of the fields asks for.

        Raises:
            PydanticCustomError: structured_outputs asks for several things.
        """
        outputs = self.structured_outputs
        return {
            "guided_json": None if self.guided_json is None else schema_constraint(self.guided_json),
            "guided_regex": regex_constraint(self.guided_regex),
            "guided_choice": choice_constraint(self.guided_choice),
            "guided_grammar": grammar_constraint(self.guided_grammar),
            "structured_outputs": None if outputs is None else outputs.constraint("structured_outputs"),
        }


_CONSTRAINTS = frozenset({*ConstraintFields.model_fields, "response_format"})


class GenerationRequest(SamplingFields, ConstraintFields, NeutralFields, RequestBody, ABC):
    """The fields of both endpoints."""

    n: StrictInt | None = Field(None, ge=1, le=N_MAX, description="answers, each with a seed derived from `seed`")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: Text | None = Field(None, max_length=512, description="requests with one key go to one instance")
    cache_salt: Text | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="extension: only requests with the same salt share cached prompts",
    )

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "GenerationRequest":
        if not self.stream and self.stream_options is not None and any(dict(self.stream_options).values()):
            raise fault("stream_options", "stream_options is only allowed when stream is true")
        most = self.tokens_max()
        if self.min_tokens and most is not None and self.min_tokens > most:
            raise fault("min_tokens", f"min_tokens {self.min_tokens} is over max_tokens {most}")
        self.check()
        self.constraint()
        return self

    def constraint(self) -> Constraint | None:
        """What the answer must match; None: anything goes.

        Raises:
            PydanticCustomError: several fields ask for something.
        """
        return None if self.model_fields_set.isdisjoint(_CONSTRAINTS) else only_one(self.constraints())

    @abstractmethod
    def check(self) -> None:
        """Accept fields that fit together.

        Raises:
            PydanticCustomError: they do not.
        """

    @abstractmethod
    def tokens_max(self) -> int | None:
        """The most tokens to generate; None: as many as fit."""

    @abstractmethod
    def query(self, *, tier: Tier) -> Query:
        """The request as nodes take it, for instances that are still to be chosen."""

    def as_message(self, *, tier: Tier, sampling: Sampling, **fields: Any) -> Generate:
        """What every message of the request holds, and `fields` of one of them."""
        return Generate(
            request_id="",
            instance_id="",
            model=self.model,
            tier=tier,
            sampling=sampling,
            constraint=self.constraint(),
            cache_salt=self.cache_salt or "",
            **fields,
        )

    def tier(self) -> Tier:
        return tier_of(self.service_tier)


class ChatRequest(NeutralChatFields, GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=LOGPROBS_MAX)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="a variable of the chat template; none: also enable_thinking false"
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="extension: variables of the chat template")
    store: bool | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        check_conversation(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise fault("top_logprobs", "top_logprobs needs logprobs: true")
        for name in self.chat_template_kwargs or {}:
            if is_reserved(name):
                raise fault("chat_template_kwargs", f"'{name[:40]}' is no variable that may be set")
        self._tools()

    def tokens_max(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def constraints(self) -> dict[str, Constraint | None]:
        return {"response_format": format_constraint(self.response_format)} | super().constraints()

    def query(self, *, tier: Tier) -> Query:
        n = self.n or 1
        message = self.as_message(
            tier=tier,
            sampling=self.as_sampling(
                max_tokens=self.tokens_max(), logprobs=(self.top_logprobs or 0) if self.logprobs else None
            ),
            messages=tuple(message.flattened() for message in self.messages),
            tools=self._tools(),
            template=self._template(),
        )
        return Query(prompts=(message,), n=n, best_of=n, prompt_cache_key=self.prompt_cache_key or "")

    def _tools(self) -> ToolUse | None:
        return chat_tools(self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def _template(self) -> dict[str, Any]:
        return effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})


def _few_prompts(value: Any) -> Any:
    """Refuse what is no prompt, in one message instead of one for each alternative."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("a string, token ids, or a list of either")
    if all(isinstance(each, str) for each in value) or all(isinstance(each, list) and each for each in value):
        if len(value) > PROMPTS_MAX:
            raise ValueError(f"at most {PROMPTS_MAX} prompts, not {len(value)}")
        return value
    if all(type(each) is int and 0 <= each <= TOKEN_ID_MAX for each in value):
        return value
    raise ValueError("a string, token ids, or a list of either")


TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_MAX)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=PROMPTS_MAX)],
    BeforeValidator(_few_prompts),
]


class CompletionRequest(NeutralCompletionFields, GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = Field(COMPLETION_MAX_TOKENS, ge=1)
    best_of: StrictInt | None = Field(
        None,
        ge=1,
        le=BEST_OF_MAX,
        description="answers made; the `n` with the best mean log probability count",
    )
    logprobs: StrictInt | None = Field(None, ge=0, le=LOGPROBS_MAX)
    echo: bool | None = Field(None, description="the answer begins with its prompt, which is text then")

    def check(self) -> None:
        n, made = self.n or 1, self._made()
        if made < n:
            raise fault("best_of", f"best_of {made} is under n {n}")
        if made > n and self.stream:
            raise fault("best_of", "best_of over n is not possible with stream: the best is known at the end")
        prompts = len(self._prompts())
        if prompts * made > CHOICES_MAX:
            raise fault(
                "best_of" if self.best_of else "n",
                f"at most {CHOICES_MAX} answers a request, not {made} for each of {prompts} prompts",
            )
        if self.echo and self.logprobs is not None:
            raise unsupported(
                "log probabilities of prompts are not supported: echo or logprobs, not both", field="echo"
            )
        if self.echo and any("prompt_tokens" in prompt for prompt in self._prompts()):
            raise unsupported("echo needs prompts of text, not of token ids", field="echo")

    def tokens_max(self) -> int | None:
        return self.max_tokens

    def query(self, *, tier: Tier) -> Query:
        n, made = self.n or 1, self._made()
        hidden = made > n and self.logprobs is None
        prompts = self._prompts()
        sampling = self.as_sampling(max_tokens=self.max_tokens, logprobs=0 if hidden else self.logprobs)
        return Query(
            prompts=tuple(self.as_message(tier=tier, sampling=sampling, **prompt) for prompt in prompts),
            n=n,
            best_of=made,
            prompt_cache_key=self.prompt_cache_key or "",
            options=({"hide_logprobs": True} if hidden else {}) | ({"echo": True} if self.echo else {}),
            input_field="" if len(prompts) == 1 and "prompt" in prompts[0] else "prompt",
        )

    def _made(self) -> int:
        return self.best_of or self.n or 1

    def _prompts(self) -> list[dict[str, Any]]:
        """The prompts, each in the field of `Generate` that it belongs to."""
        given: list[Any] = (
            [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt
        )
        return [{"prompt": one} if isinstance(one, str) else {"prompt_tokens": tuple(one)} for one in given]


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
    named: str | None = fault.get("ctx", {}).get("field")
    field = named or ".".join(path).encode(errors="replace").decode() or None
    if fault["type"] == "extra_forbidden":
        return UnknownParameterError(f"{field}: there is no such field", param=field)
    message = str(fault["msg"]).removeprefix("Value error, ").encode(errors="replace").decode()
    kind = UnsupportedParameterError if fault["type"] == UNSUPPORTED else InvalidValueError
    return kind(f"{field}: {message}" if field else message, param=field)
