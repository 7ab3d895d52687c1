"""Schemas: where their parts are, and what the grammar library takes more loosely than JSON Schema means it."""

from collections.abc import Iterator
from typing import Any

from dataplane.protocol.errors import BadRequestError

INTEGER_MAX = 2**53
_INSIDE = 1e-6
DEPTH_MAX = 200
"""Deeper schemas are left as they are: the library refuses them."""

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SINGLE = frozenset({"items", "additionalProperties", "additionalItems", "not", "contains", "if", "then", "else"})

_VALUES = frozenset({"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DAY = r"(0[1-9]|[12]\d|3[01])"
_LEAP_YEAR = r"([1-9]\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DAYS = rf"((0[13578]|1[02])-{_DAY}|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = rf"([1-9]\d{{3}}-{_DAYS}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_REPLACED = {"time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Formats as patterns. The library allows a leap second in every minute."""
_STRICTER: dict[str, dict[str, Any]] = {
    "email": {"pattern": r"^[^@]{1,64}@([^.@]{1,63}\.){0,2}[^.@]{1,63}$"},
    "hostname": {"maxLength": 253},
}
"""By format, what all its texts must match besides; the library does not know these limits."""


def parts(schema: Any) -> Iterator[tuple[str, str | int | None, Any]]:
    """The schemas inside of a schema: the keyword, the key or index under it (None if the schema is its value), and the
    schema.
    """
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in _BY_NAME and isinstance(value, dict):
            yield from ((keyword, key, part) for key, part in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((keyword, index, part) for index, part in enumerate(value))
        elif keyword in _SINGLE and isinstance(value, dict):
            yield keyword, None, value


def step_of(keyword: str, key: str | int | None) -> str:
    """A step in the path of a schema."""
    if isinstance(key, int):
        return f".{keyword}[{key}]"
    return f".{keyword}" if key is None else f".{keyword}.{key}"


def tightened(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose answers match the given one also where the library alone would not see to it, but for names of
    properties that are written with escapes: where further properties must match something of their own, or names must
    match patterns.

    Raises:
        BadRequestError: a `minProperties` that keys which the schema does not name would have to meet: nothing keeps
            them from being the same. Or a value that is an integer too large for the library's numbers.
    """
    return _tightened(schema, has_patterns=_has_patterns(schema))


def _tightened(schema: dict[str, Any], depth: int = 0, *, has_patterns: bool) -> dict[str, Any]:
    if depth >= DEPTH_MAX:
        return schema
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, named):
        raise BadRequestError(
            f"minProperties over 1 must be met by required properties, not {least}", param="definition"
        )
    for keyword in _VALUES & schema.keys():
        _check_integers(schema[keyword])
    made = {**schema, **_bounds(schema)}
    for keyword, key, part in parts(schema):
        if not isinstance(part, dict):
            continue
        inner = _tightened(part, depth + 1, has_patterns=has_patterns)
        if key is None:
            made[keyword] = inner
        else:
            if made[keyword] is schema[keyword]:
                made[keyword] = schema[keyword].copy()
            made[keyword][key] = inner
    if not has_patterns:
        made = _with_further_names(made)
    return _with_format(made, str(schema.get("format")))


def _has_patterns(schema: Any) -> bool:
    """Whether a schema, or anything inside of it that it may refer to, has patterns of names."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if "patternProperties" in part:
                return True
            left += part.values()
        elif isinstance(part, list):
            left += part
    return False


def _with_further_names(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that allows any further properties besides those it lists, with a pattern that all of their names match.
    It means the same, but in names that match a pattern the library allows no escapes that make one a listed name. It
    refuses several patterns that a name may match, as parts of an `allOf` may have.
    """
    further = schema.get("additionalProperties", True)
    if "properties" not in schema or (further is not True and further != {}):
        return schema
    return {**schema, "patternProperties": {"": {}}, "additionalProperties": False}


def _with_format(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema with what a format means besides, or instead, of what the library makes of it."""
    if name in _REPLACED:
        schema = {keyword: value for keyword, value in schema.items() if keyword != "format"}
        besides: dict[str, Any] = {"pattern": _REPLACED[name]}
    else:
        besides = _STRICTER.get(name, {})
    if besides.keys().isdisjoint(schema):
        return {**schema, **besides}
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*others, besides]} if isinstance(others, list) else schema


def _bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Exclusive bounds of numbers as bounds that are just inside: between a whole number and the next the library
    includes an exclusive bound.
    """
    made: dict[str, Any] = {}
    if schema.get("type") == "integer":
        return made
    for exclusive, inclusive, inside in (
        ("exclusiveMinimum", "minimum", _INSIDE),
        ("exclusiveMaximum", "maximum", -_INSIDE),
    ):
        bound = schema.get(inclusive) if schema.get(exclusive) is True else schema.get(exclusive)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and float(bound).is_integer():
            made[exclusive] = bound + inside
    return made


def _check_integers(value: Any, depth: int = 0) -> None:
    """Refuse integers that the library would round."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > INTEGER_MAX:
        raise BadRequestError(f"integers beyond {INTEGER_MAX} cannot be enforced, as {value}", param="definition")
    if depth < DEPTH_MAX and isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            _check_integers(one, depth + 1)
