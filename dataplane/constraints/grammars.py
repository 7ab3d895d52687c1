"""From a `Constraint` to the grammar text that llguidance compiles.

A grammar text is a Lark grammar, or JSON `{"grammars": [...]}` of several, of which the first is the answer's and may
name the others as `@name`. The syntax is described in https://github.com/guidance-ai/llguidance/blob/main/docs.

Nothing here imports llguidance: whoever composes grammars need not be able to compile them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.constraints.schemas import tightened
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Constraint

WHITESPACE = r"( |\n( {1,40}|\t{1,10})?)"
"""Whitespace between the parts of JSON: a blank, or a new line with its indentation. Without a limit, a model that
prefers blanks would write them for ever.
"""

_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
_LAYOUT = "x-guidance"
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", flags=re.MULTILINE)
_BLANKS = r"/[ \n\r\t]{0,64}/"
_ANY_TEXT = r"/(.|\n)*/"
_ANSWER = "answer"
_NO_TOKENS: Mapping[str, int] = {}


def grammar_of(constraint: Constraint, added_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """The grammar text of a constraint. `added_tokens`: ids of the tokenizer's added tokens by their text; a marker
    that is one of them is matched as that token.

    Raises:
        BadRequestError: the definition is not what its kind requires; `param` is "definition".
    """
    if not constraint.after:
        return json.dumps({"grammars": [_entry(constraint)]})
    answer = {"name": _ANSWER, **_entry(constraint)}
    reasoning = free_text_until(constraint.after, added_tokens, rule="reasoning")
    begins = f"({marker(constraint.opening, added_tokens)} reasoning {_BLANKS})?" if constraint.opening else ""
    lark = f"start: {begins or f'reasoning {_BLANKS}'} @{_ANSWER}\n{reasoning}"
    return json.dumps({"grammars": [{"lark_grammar": lark}, answer]})


def json_piece(schema: dict[str, Any]) -> str:
    """A piece of a Lark grammar: JSON that matches a schema.

    Raises:
        BadRequestError: the schema sets options of the grammar library, or has keywords that it cannot enforce.
    """
    return f"%json {json.dumps(_with_options(schema))}"


def marker(text: str, added_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """A piece of a Lark grammar: exactly this text, as one token if it is an added one."""
    token = added_tokens.get(text)
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def free_text_until(text: str, added_tokens: Mapping[str, int] = _NO_TOKENS, *, rule: str = "text_end") -> str:
    """A rule of a Lark grammar: any text up to a marker, and the marker."""
    if text in added_tokens:
        return f"{rule}: {_ANY_TEXT} {marker(text, added_tokens)}\n"
    return f"{rule}[lazy]: /(.|\\n)*{_escaped(text)}/\n"


def free_text_with(
    calls: str, begin: str, added_tokens: Mapping[str, int] = _NO_TOKENS, *, parallel: bool = True
) -> str:
    """A Lark grammar: any text; but where the marker `begin` is written, what follows it must match the piece `calls`
    (which says itself how a call ends), after which text goes on. `parallel` False: at most one call, which is last.
    """
    body = f"(text_end {calls})* rest" if parallel else f"rest | text_end {calls}"
    return f"start: {body}\nrest: {_ANY_TEXT}\n{free_text_until(begin, added_tokens)}"


def _entry(constraint: Constraint) -> dict[str, Any]:
    """One grammar of the list that llguidance takes."""
    definition = constraint.definition
    match constraint.kind:
        case "json_object":
            return {"json_schema": _with_options({"type": "object"})}
        case "json_schema":
            return {"json_schema": _with_options(parsed_schema(definition))}
        case "regex":
            if not definition:
                raise BadRequestError("the regular expression is empty", param="definition")
            return {"lark_grammar": f"start: /{_slashed(definition)}/"}
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in _choices(definition))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}
        case "grammar":
            return {"lark_grammar": _lark(definition)}


def parsed_schema(definition: str) -> dict[str, Any] | bool:
    """The schema of a definition.

    Raises:
        BadRequestError: it is no JSON, or no schema.
    """
    try:
        schema = json.loads(definition, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the schema is no JSON: {error}", param="definition") from error
    if not isinstance(schema, dict | bool):
        raise BadRequestError("the schema must be an object", param="definition")
    return schema


def _with_options(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if not isinstance(schema, dict):
        return schema
    if _LAYOUT in schema:
        raise BadRequestError(f"the schema must not set {_LAYOUT}", param="definition")
    return {**tightened(schema), _LAYOUT: _OPTIONS}


def _choices(definition: str) -> Sequence[str]:
    try:
        choices = json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the choices are no JSON: {error}", param="definition") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise BadRequestError("the choices must be a list of at least one string", param="definition")
    if "" in choices:
        raise BadRequestError("a choice must not be empty", param="definition")
    return choices


def _lark(definition: str) -> str:
    """A Lark grammar; one in GBNF is translated."""
    if not _GBNF_RULE.search(definition):
        return definition
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415  (only where grammars are compiled)

    try:
        return str(any_to_lark(definition))
    except Exception as error:  # whatever the translation does with a text
        raise BadRequestError(f"the GBNF grammar cannot be translated: {error}", param="definition") from error


def _slashed(regex: str) -> str:
    """A regular expression between the slashes of Lark: a slash that is not escaped yet is."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")


def _escaped(text: str) -> str:
    """A text as part of a regular expression between the slashes of Lark."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):X}}}" for letter in text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
