"""Fields of OpenAI's and vLLM's requests that are not supported: accepted with their default value, else refused with a
message, so that no client assumes a penalty or a tool that was never applied.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

STOP_STRINGS_MAX = 4
UNSUPPORTED = "unsupported_parameter"
"""Pydantic's type of these errors, and OpenAI's code for them."""


def _valid_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]


def unsupported(message: str) -> PydanticCustomError:
    """The refusal of a value; its message is for the client's user."""
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


def _only(message: str, *neutral: Any) -> BeforeValidator:
    """Accept null and the values that mean the default; refuse all others."""

    def check(value: Any) -> None:
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise unsupported(message)

    return BeforeValidator(check)


def _no(what: str) -> str:
    return f"{what} are not supported yet"


_ZERO, _ONE = (0, 0.0), (1, 1.0)
NoTools = Annotated[SkipJsonSchema[None], _only(_no("tools"), [])]
NoToolChoice = Annotated[SkipJsonSchema[None], _only(_no("tools"), "none", "auto")]
NoPenalty = Annotated[SkipJsonSchema[None], _only(_no("penalties"), *_ZERO)]
NoBias = Annotated[SkipJsonSchema[None], _only(_no("token biases"), {})]
NoLogprobs = Annotated[SkipJsonSchema[None], _only(_no("log probabilities"), False)]
NoTopLogprobs = Annotated[SkipJsonSchema[None], _only(_no("log probabilities"), 0)]
OneAnswer = Annotated[SkipJsonSchema[None], _only("only one answer for each request is supported yet", 1)]


class NeutralFields(BaseModel):
    """Fields of both endpoints. The OpenAPI document leaves them out: it lists what is supported."""

    n: OneAnswer = None
    frequency_penalty: NoPenalty = None
    presence_penalty: NoPenalty = None
    repetition_penalty: Annotated[SkipJsonSchema[None], _only(_no("penalties"), *_ONE)] = None
    length_penalty: Annotated[SkipJsonSchema[None], _only(_no("penalties"), *_ONE)] = None
    logit_bias: NoBias = None
    top_k: Annotated[SkipJsonSchema[None], _only("top_k is not supported yet; top_p is", -1, 0)] = None
    min_p: Annotated[SkipJsonSchema[None], _only("min_p is not supported yet; top_p is", *_ZERO)] = None
    use_beam_search: Annotated[SkipJsonSchema[None], _only("beam search is not supported yet", False)] = None
    stop_token_ids: Annotated[SkipJsonSchema[None], _only(_no("stop tokens"), [])] = None
    include_stop_str_in_output: Annotated[
        SkipJsonSchema[None], _only("stop strings are never part of the answer", False)
    ] = None
    skip_special_tokens: Annotated[SkipJsonSchema[None], _only("special tokens are never shown", True)] = None
    prompt_logprobs: NoTopLogprobs = None


class NeutralChatFields(BaseModel):
    """Fields of chat completions."""

    tools: NoTools = None
    tool_choice: NoToolChoice = None
    functions: NoTools = None
    function_call: NoToolChoice = None
    parallel_tool_calls: Annotated[bool | None, Field(description="without tools it means nothing")] = None
    response_format: Annotated[
        SkipJsonSchema[None],
        _only("only text answers are supported yet: response_format may be {'type': 'text'}", {"type": "text"}),
    ] = None
    logprobs: NoLogprobs = None
    top_logprobs: NoTopLogprobs = None
    modalities: Annotated[SkipJsonSchema[None], _only("only text answers are supported yet", ["text"], [])] = None
    audio: Annotated[SkipJsonSchema[None], _only("only text answers are supported yet")] = None
    reasoning_effort: Annotated[SkipJsonSchema[None], _only("reasoning effort cannot be set yet", "none")] = None
    verbosity: Annotated[SkipJsonSchema[None], _only("verbosity cannot be set yet", "medium")] = None
    web_search_options: Annotated[SkipJsonSchema[None], _only("web search is not supported")] = None
    prediction: Annotated[SkipJsonSchema[None], _only("predicted outputs are not supported yet")] = None


class NeutralCompletionFields(BaseModel):
    """Fields of completions."""

    echo: Annotated[SkipJsonSchema[None], _only("echo is not supported yet", False)] = None
    best_of: OneAnswer = None
    logprobs: Annotated[SkipJsonSchema[None], _only(_no("log probabilities"))] = None
    suffix: Annotated[SkipJsonSchema[None], _only("a suffix is not supported yet", "")] = None


def _few_stops(value: Any) -> Any:
    if isinstance(value, list) and len(value) > STOP_STRINGS_MAX:
        raise ValueError(f"at most {STOP_STRINGS_MAX} stop strings, not {len(value)}")
    if not isinstance(value, str | list | None) or (value and not all(isinstance(each, str) for each in value)):
        raise ValueError(f"a string, or a list of at most {STOP_STRINGS_MAX} strings")
    return value


Stop = Annotated[Text | Annotated[list[Text], Field(max_length=STOP_STRINGS_MAX)] | None, BeforeValidator(_few_stops)]


def _text_parts_only(value: Any) -> Any:
    parts = value if isinstance(value, list) else []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(f"only text is supported yet, not parts of type '{kind[:40]}'")
    return value


TEXT_PARTS_ONLY: BeforeValidator = BeforeValidator(_text_parts_only)


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) > 1 and not isinstance(value[0], int):
        raise unsupported(f"only one prompt for each request is supported yet, not {len(value)}")
    return value


ONE_PROMPT: BeforeValidator = BeforeValidator(_one_prompt)
