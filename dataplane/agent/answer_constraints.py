"""What the text of an answer must match: the request's own constraint, the calls that its tools demand, or both."""

import json
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from dataplane.agent.parsing.families import Families
from dataplane.agent.parsing.tool_grammar import ANY_ARGUMENTS, CallGrammar
from dataplane.agent.tokenization import Tokenizer
from dataplane.constraints.grammars import parsed_schema
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Constraint, Generate, Tool, ToolUse


class Check(Protocol):
    """Refuses a constraint that cannot be compiled for the model; the error names `param`."""

    def __call__(self, constraint: Constraint, *, param: str | None = None) -> Awaitable[None]: ...


async def answer_constraint(
    generate: Generate, families: Families, tokenizer: Tokenizer, tail: str, check: Check
) -> Constraint | None:
    """The constraint of an answer, which reasoning may precede; None: anything goes. `tail`: see `answer_text`.

    Raises:
        BadRequestError: it cannot be compiled. Where the schema of a tool is at fault, the error names the tool.
        OverloadedError: too many others wait to be checked.
    """
    constraint, param = generate.constraint, None
    calls = await _calls(generate.tools, families, tokenizer, check) if generate.messages is not None else None
    if calls is not None and generate.tools is not None:
        free = generate.tools.choice == "auto"
        grammar = calls.free() if free else calls.forced()
        if free and constraint is not None:
            await check(constraint)
            grammar = _with_format(calls, constraint)
        elif free and not any(tool.strict for tool in generate.tools.tools):
            grammar = ""
        if grammar:
            constraint, param = Constraint(kind="grammar", definition=grammar), "tools"
    if constraint is None:
        return None
    form = families.reasoning if generate.messages is not None else None
    if form is not None:
        begun = form.assumed or tail.rstrip().endswith(form.opening)
        constraint = replace(constraint, after=form.closing, opening="" if begun else form.opening)
    await check(constraint, param=param)
    return constraint


async def _calls(uses: ToolUse | None, families: Families, tokenizer: Tokenizer, check: Check) -> CallGrammar | None:
    """The calls that an answer may hold; None where it holds none, or none that are looked for."""
    if uses is None or uses.choice == "none":
        return None
    if families.tools is None:
        if uses.choice == "auto":
            return None
        raise BadRequestError("the model has no tool parser, so no call can be required", param="tool_choice")
    numbered = [one for one in enumerate(uses.tools) if uses.choice != "named" or one[1].name == uses.name]
    return CallGrammar(
        syntax=families.tools.syntax_for(tokenizer.added_tokens),
        tools=[tool for _, tool in numbered],
        schemas=[
            await _schema(number, tool, check, strict=tool.strict, free=uses.choice == "auto")
            for number, tool in numbered
        ],
        added=tokenizer.added_tokens,
        parallel=uses.parallel and uses.choice != "named",
    )


async def _schema(number: int, tool: Tool, check: Check, *, strict: bool, free: bool) -> Mapping[str, Any]:
    """The schema of a tool's arguments: its own, where it is strict or the call is required. A tool that is not strict
    may have a schema that cannot be compiled; its arguments are then any object.
    """
    schema = {**ANY_ARGUMENTS, **(tool.parameters or {})}
    if free and not strict:
        return ANY_ARGUMENTS
    try:
        definition = Constraint(kind="json_schema", definition=json.dumps(schema))
        await check(definition, param=f"tools.{number}.function.parameters")
    except BadRequestError:
        if strict:
            raise
        return ANY_ARGUMENTS
    return schema


def _with_format(calls: CallGrammar, constraint: Constraint) -> str:
    """Calls, or an answer in the format that was asked for; empty where only the format can be demanded."""
    if not calls.syntax.opening or constraint.kind not in {"json_object", "json_schema"}:
        return ""
    schema = parsed_schema(constraint.definition) if constraint.kind == "json_schema" else ANY_ARGUMENTS
    return calls.or_json(schema) if isinstance(schema, dict) else ""
