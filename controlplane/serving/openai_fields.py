"""Types that fields of several requests share, and fields of OpenAI's and vLLM's requests that are not supported: those
are accepted with their default value, else refused with a message, so that no client assumes what was never applied.
"""

import math
from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from controlplane.bodies import ClientBody

STOP_STRINGS_MAX = 4
PARTS_MAX = 2048
"""Of the content of one message."""
OBJECT_BYTES_MAX = 64 * 1024
"""Of a JSON schema, a grammar, or another object that is passed on, as JSON text."""
TOKEN_ID_MAX = 2**31 - 1
UNSUPPORTED: Final = "unsupported_parameter"
"""Pydantic's type of these errors, and OpenAI's code for them."""
INVALID: Final = "invalid_value"
"""Pydantic's type of errors that name their field themselves."""


def _valid_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]
FunctionName = Annotated[Text, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Metadata = Annotated[
    dict[Annotated[Text, Field(min_length=1, max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=16),
]
"""Labels of a client's own, as many and as long as OpenAI's."""
TokenId = Annotated[StrictInt, Field(ge=0, le=TOKEN_ID_MAX)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class RequestBody(ClientBody):
    """The body of a request for a model. A field that is null counts as absent, even an unknown one."""

    model_config = ConfigDict(extra="forbid")
    model: Text = Field(min_length=1, max_length=200)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given


def json_text(value: Any) -> str:
    """A value as JSON text.

    Raises:
        ValueError: it is too large or too deep, or holds what JSON text cannot.
    """
    try:
        encoded = msgspec.json.encode(value)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except (UnicodeEncodeError, OverflowError):
        raise ValueError("holds a string or a number that cannot be passed on") from None
    if len(encoded) > OBJECT_BYTES_MAX:
        raise ValueError(f"at most {OBJECT_BYTES_MAX} bytes of JSON are allowed, not {len(encoded)}")
    if not _is_finite(value):  # it would be written as null
        raise ValueError("holds a number that is not finite")
    return encoded.decode()


def _is_finite(value: Any) -> bool:
    """Whether all numbers in a value are finite."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, float) and not math.isfinite(one):
            return False
    return True


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    json_text(value)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]


def effort_variables(effort: ReasoningEffort | None) -> JsonObject:
    """The variables of chat templates that say how much the model shall think."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def unsupported(message: str, *, field: str | None = None) -> PydanticCustomError:
    """The refusal of a value; its message is for the client's user. `field`: as in `fault`."""
    return _refusal(UNSUPPORTED, message, field)


def fault(field: str, message: str) -> PydanticCustomError:
    """The refusal of a field that only a look at the whole request can judge."""
    return _refusal(INVALID, message, field)


def _refusal(
    kind: Literal["unsupported_parameter", "invalid_value"], message: str, field: str | None
) -> PydanticCustomError:
    """What is quoted from the request may hold what UTF-8 cannot encode."""
    shown = message.encode(errors="replace").decode()
    return PydanticCustomError(kind, "{message}", {"message": shown} | ({"field": field} if field else {}))


def only(message: str, *accepted: Any) -> BeforeValidator:
    """Accept null and these values, as they are; refuse all others."""

    def check(value: Any) -> Any:
        if not _is_among(value, accepted):
            raise unsupported(message)
        return value

    return BeforeValidator(check)


def neutral(message: str, *defaults: Any) -> BeforeValidator:
    """Accept the values that mean the default, as null; refuse all others."""

    def check(value: Any) -> None:
        if not _is_among(value, defaults):
            raise unsupported(message)

    return BeforeValidator(check)


def _is_among(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value is null or one of these; True is not 1."""
    return value is None or any(type(value) is type(each) and value == each for each in accepted)


def kind_of(value: Any) -> str | None:
    """The `type` of an object that is read or is still to be; None: it has none."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def item_tag(value: Any) -> str | None:
    """The tag of the model of an object with a `type`. Errors leave tags of this form out of the path to the field."""
    kind = kind_of(value)
    return None if kind is None else f"item:{kind}"


def refuse_other_kinds(value: Any, kinds: Collection[str], refusal: str) -> None:
    """Refuse an object whose type is not among `kinds`. `refusal`: the message, with {} for the type.

    Raises:
        PydanticCustomError: its type is another.
    """
    kind = kind_of(value)
    if kind is not None and kind not in kinds:
        raise unsupported(refusal.format(kind[:40]))


def only_parts(*kinds: str, refusal: str = "only text is supported yet, not parts of type '{}'") -> BeforeValidator:
    """Refuse lists of too many parts, and with parts of other kinds, as `refuse_other_kinds` does."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > PARTS_MAX:
            raise ValueError(f"at most {PARTS_MAX} parts, not {len(value)}")
        for part in value if isinstance(value, list) else ():
            refuse_other_kinds(part, kinds, refusal)
        return value

    return BeforeValidator(check)


def text_as(kind: str, schema: Any) -> BeforeValidator:
    """A text is a list of one part of this kind. `schema`: the type that the OpenAPI document shows."""

    def check(value: Any) -> Any:
        return [{"type": kind, "text": value}] if isinstance(value, str) else value

    return BeforeValidator(check, json_schema_input_type=schema)


def _no(what: str) -> str:
    return f"{what} are not supported yet"


_OLD_TOOLS = "the older functions are not supported; tools are"
NoFunctions = Annotated[SkipJsonSchema[None], neutral(_OLD_TOOLS, [])]


class NeutralFields(BaseModel):
    """Fields of both endpoints. The OpenAPI document leaves them out: it lists what is supported."""

    length_penalty: Annotated[SkipJsonSchema[None], neutral("beam search is not supported yet", 1, 1.0)] = None
    use_beam_search: Annotated[SkipJsonSchema[None], neutral("beam search is not supported yet", False)] = None
    stop_token_ids: Annotated[SkipJsonSchema[None], neutral(_no("stop tokens"), [])] = None
    include_stop_str_in_output: Annotated[
        SkipJsonSchema[None], neutral("stop strings are never part of the answer", False)
    ] = None
    skip_special_tokens: Annotated[SkipJsonSchema[None], neutral("special tokens are never shown", True)] = None
    prompt_logprobs: Annotated[SkipJsonSchema[None], neutral(_no("log probabilities of prompts"), 0)] = None


class NeutralChatFields(BaseModel):
    """Fields of chat completions."""

    functions: NoFunctions = None
    function_call: Annotated[SkipJsonSchema[None], neutral(_OLD_TOOLS, "none", "auto")] = None
    modalities: Annotated[SkipJsonSchema[None], neutral("only text answers are supported yet", ["text"], [])] = None
    audio: Annotated[SkipJsonSchema[None], neutral("only text answers are supported yet")] = None
    verbosity: Annotated[SkipJsonSchema[None], neutral("verbosity cannot be set yet", "medium")] = None
    web_search_options: Annotated[SkipJsonSchema[None], neutral("web search is not supported")] = None
    prediction: Annotated[SkipJsonSchema[None], neutral("predicted outputs are not supported yet")] = None


class NeutralCompletionFields(BaseModel):
    """Fields of completions."""

    suffix: Annotated[SkipJsonSchema[None], neutral("a suffix is not supported yet", "")] = None


def _few_stops(value: Any) -> Any:
    if isinstance(value, list) and len(value) > STOP_STRINGS_MAX:
        raise ValueError(f"at most {STOP_STRINGS_MAX} stop strings, not {len(value)}")
    if not isinstance(value, str | list | None) or (value and not all(isinstance(each, str) for each in value)):
        raise ValueError(f"a string, or a list of at most {STOP_STRINGS_MAX} strings")
    return value


Stop = Annotated[Text | Annotated[list[Text], Field(max_length=STOP_STRINGS_MAX)] | None, BeforeValidator(_few_stops)]
