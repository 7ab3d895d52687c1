"""What the text of an answer must match, as OpenAI (`response_format`) and vLLM (`structured_outputs`) spell it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from controlplane.serving.openai_fields import (
    OBJECT_BYTES_MAX,
    FunctionName,
    JsonObject,
    Text,
    fault,
    item_tag,
    json_text,
)
from dataplane.protocol.messages import Constraint

CHOICES_MAX = 1024
_KINDS = ("json", "json_object", "regex", "choice", "grammar")

Pattern = Annotated[Text, Field(min_length=1, max_length=OBJECT_BYTES_MAX)]
Choice = Annotated[
    list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=CHOICES_MAX, fail_fast=True)
]


class JsonSchemaFormat(BaseModel):
    """A JSON schema and its name. Answers always match the schema, also without `strict`."""

    model_config = ConfigDict(extra="forbid")
    name: FunctionName
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    """Any text."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_object"]


class JsonSchemaResponse(BaseModel):
    """JSON that matches a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


def _known_format(value: Any) -> Any:
    if item_tag(value) not in _FORMATS:
        raise ValueError("an object whose type is 'text', 'json_object' or 'json_schema'")
    return value


_FORMATS = ("item:text", "item:json_object", "item:json_schema")
ResponseFormat = Annotated[
    Annotated[TextFormat, Tag(_FORMATS[0])]
    | Annotated[JsonObjectFormat, Tag(_FORMATS[1])]
    | Annotated[JsonSchemaResponse, Tag(_FORMATS[2])],
    Discriminator(item_tag),
    BeforeValidator(_known_format),
]


def _object_of(value: Any) -> Any:
    """A schema may be given as JSON text too, as vLLM allows."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None


Schema = Annotated[JsonObject, BeforeValidator(_object_of)]


class StructuredOutputs(BaseModel):
    """vLLM's extension: exactly one of these. `grammar` is a Lark grammar."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    json_: Schema | None = Field(None, alias="json", description="a JSON schema, as an object or as text")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choice | None = None
    grammar: Pattern | None = None

    def constraint(self, field: str) -> Constraint | None:
        """The one that is given; None: none is.

        Raises:
            PydanticCustomError: several are given.
        """
        given = [
            kind for kind, value in zip(_KINDS, self._values(), strict=True) if value is not None and value is not False
        ]
        if len(given) > 1:
            raise fault(field, f"one of {', '.join(given)} may be given, not several")
        if self.json_ is not None:
            return schema_constraint(self.json_)
        other = choice_constraint(self.choice) or regex_constraint(self.regex) or grammar_constraint(self.grammar)
        return other or (Constraint(kind="json_object") if self.json_object else None)

    def _values(self) -> tuple[Any, ...]:
        return self.json_, self.json_object, self.regex, self.choice, self.grammar


def schema_constraint(schema: dict[str, Any]) -> Constraint:
    """The answer matches this JSON schema."""
    return Constraint(kind="json_schema", definition=json_text(schema))


def choice_constraint(texts: list[str] | None) -> Constraint | None:
    """The answer is one of these texts."""
    return None if texts is None else Constraint(kind="choice", definition=json_text(texts))


def regex_constraint(pattern: str | None) -> Constraint | None:
    """The answer matches this regular expression."""
    return None if pattern is None else Constraint(kind="regex", definition=pattern)


def grammar_constraint(grammar: str | None) -> Constraint | None:
    """The answer follows this Lark grammar."""
    return None if grammar is None else Constraint(kind="grammar", definition=grammar)


def format_constraint(given: TextFormat | JsonObjectFormat | JsonSchemaResponse | None) -> Constraint | None:
    """What a `response_format` asks for; None: any text."""
    if isinstance(given, JsonObjectFormat):
        return Constraint(kind="json_object")
    return schema_constraint(given.json_schema.schema_) if isinstance(given, JsonSchemaResponse) else None


def only_one(constraints: Mapping[str, Constraint | None]) -> Constraint | None:
    """The one constraint of a request, by the field that it was given in.

    Raises:
        PydanticCustomError: several fields ask for one.
    """
    given = {field: constraint for field, constraint in constraints.items() if constraint is not None}
    if len(given) > 1:
        *_, last = given
        raise fault(last, f"one of {', '.join(given)} may be given, not several")
    return next(iter(given.values()), None)
