"""Schemas of our own making, and an oracle that knows nothing of how answers are made.

The public JSON Schema Test Suite is read from the folder that `JSON_SCHEMA_TEST_SUITE` names, a checkout of
https://github.com/json-schema-org/JSON-Schema-Test-Suite. The source distribution of PyPI's `jsonschema` has one, too,
in `json/`.
"""

import json
import os
import random
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE")
_TEXTS = ("a", "yes", "ja!", "né", "größe", "日本", "😀", 'q"uote', "back\\slash", "two\nlines", "", " ", "/", "<b>")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_PATTERNS = ("^[a-z]{2,5}$", "[0-9]", "^(ab|cd)+$", "^\\d{3}-\\d{2}$", "x.y", "^[äöü]{1,3}$", "^a?b*c$", "^[^a-z]{2}$")


def own_schemas(count: int, *, seed: int = 0) -> list[Schema]:
    """Nested schemas of all that is supported, the same for the same seed."""
    chance = random.Random(seed)
    return [_rooted(chance, number) for number in range(count)]


def public_schemas() -> list[Schema]:
    """The schemas of the test suite's newest draft; none where it is not."""
    if SUITE is None:
        return []
    files = sorted((Path(SUITE) / "tests" / "draft2020-12").rglob("*.json"))
    cases = [case for file in files for case in json.loads(file.read_text(encoding="utf-8"))]
    return [case["schema"] for case in cases if isinstance(case["schema"], dict)]


def violation(schema: Schema, text: str) -> str | None:
    """Why a text is no JSON that matches a schema; None if it is."""
    try:
        value = json.loads(text, parse_float=_number_of, parse_constant=_no_constant)
    except ValueError as error:
        return f"no JSON: {error}"
    return next(_violations(schema, value), None)


def _violations(schema: Schema, value: Any) -> Iterator[str]:
    try:
        import jsonschema_rs  # noqa: PLC0415  (vLLM's environment has the other one)
    except ModuleNotFoundError:
        import jsonschema  # noqa: PLC0415

        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        for error in kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value):
            yield error.message
        return
    for problem in jsonschema_rs.validator_for(schema, validate_formats=True).iter_errors(value):
        yield problem.message


def _number_of(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of more than 18 digits, which JSON allows
        return Decimal("1E+1000") if "e-" not in text.lower() else Decimal(0)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _rooted(chance: random.Random, number: int) -> Schema:
    """A schema with definitions that it refers to; every eighth is recursive."""
    if number % 8 == 0:
        value = _scalar(chance)
        node = {
            "type": "object",
            "properties": {"value": value, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    if number % 8 == 1:
        shared = {"one": _scalar(chance), "other": _object(chance, 1)}
        kind = {"anyOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]}
        items = {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3}
        return {
            "$defs": shared,
            "type": "object",
            "properties": {"kind": kind, "list": items},
            "required": ["kind", "list"],
            "additionalProperties": False,
        }
    return _schema(chance, depth=3)


def _schema(chance: random.Random, depth: int) -> Schema:
    if depth == 0:
        return _scalar(chance)
    make = chance.choice((_scalar, _object, _object, _array, _any_of, _all_of, _map))
    return _scalar(chance) if make is _scalar else make(chance, depth)  # type: ignore[operator]


def _scalar(chance: random.Random) -> Schema:
    kinds: tuple[Schema, ...] = (
        {"type": "boolean"},
        {"type": "null"},
        {"enum": chance.sample(_TEXTS, 3) + [None, True, 17, -2.5, ["x"], {"k": 1}][: chance.randint(0, 6)]},
        {"const": chance.choice((*_TEXTS, 0, {"deep": ["ü", {"er": None}]}))},
        {"type": chance.sample(["integer", "boolean", "null"], 2)},
        {"type": "string", "format": chance.choice(_FORMATS), "maxLength": 50},
        {"type": "string", "pattern": chance.choice(_PATTERNS), "maxLength": 12},
        _text(chance),
        _integer(chance),
        _number(chance),
    )
    return chance.choice(kinds)


def _text(chance: random.Random) -> Schema:
    least = chance.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 8)}


def _integer(chance: random.Random) -> Schema:
    low = chance.randint(-1000, 1000)
    high = low + chance.choice((1, 10, 99, 12345))
    bounds = {"minimum": low, "maximum": high} if chance.random() < 0.5 else {"exclusiveMinimum": low}
    return {"type": "integer", **bounds, **({"multipleOf": chance.choice((2, 5))} if high - low > 20 else {})}


def _number(chance: random.Random) -> Schema:
    low = round(chance.uniform(-100, 100), 2)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + chance.choice((0.5, 3.25, 1e4))}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(
        ("id", "name", "größe", "a b", 'q"', "日", "list", "x/y", "$ref", "type"), chance.randint(1, 4)
    )
    properties = {name: _schema(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    extra = chance.choice((False, False, False, False, {"type": "integer"}))  # a random key seldom ends
    return {**schema, "additionalProperties": extra}


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    schema: Schema = {"type": "array", "items": _schema(chance, depth - 1), "minItems": least, "maxItems": least + 2}
    if chance.random() < 0.3:
        schema["prefixItems"] = [_scalar(chance) for _ in range(chance.randint(1, 2))]
    return schema


def _any_of(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(chance.randint(2, 3))]}


def _all_of(chance: random.Random, depth: int) -> Schema:
    first, second = _schema(chance, depth - 1), _schema(chance, depth - 1)
    parts = [{"required": [name], "properties": {name: part}} for name, part in (("left", first), ("right", second))]
    return {"type": "object", "allOf": parts, "properties": {"middle": {"type": "boolean"}}}


def _map(chance: random.Random, depth: int) -> Schema:
    """An object whose keys the schema does not name."""
    values = _schema(chance, depth - 1)
    if chance.random() < 0.85:
        return {"type": "object", "patternProperties": {"^[a-c]{1,2}$": values}, "additionalProperties": False}
    return {"type": "object", "additionalProperties": values, "maxProperties": 3, "minProperties": chance.randint(0, 1)}
