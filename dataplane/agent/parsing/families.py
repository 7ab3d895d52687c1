"""The families of models by how they write tool calls and reasoning, and how a chat template tells them apart."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from dataplane.agent.parsing.calls import CallReader, JsonCallReader, NamedCallReader
from dataplane.agent.parsing.reasoning import ReasoningFormat
from dataplane.agent.parsing.tool_calls import CallFormat
from dataplane.agent.parsing.tool_grammar import CallSyntax
from dataplane.agent.templates.chat_template import ChatTemplate
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import ModelSpec, ToolUse
from dataplane.protocol.parsers import ReasoningParserName, ToolParserName

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ToolFamily:
    """How calls are written: `form` to read them, `syntax` to write them. `markers`: special tokens that the parser
    must see, where the tokenizer has them. `short_ids`: see `spellings`.
    """

    form: CallFormat
    syntax: CallSyntax
    markers: tuple[str, ...] = ()
    short_ids: bool = False

    def syntax_for(self, added: Collection[str]) -> CallSyntax:
        """How a model with these added tokens writes calls: newer ones of Mistral have one behind the name."""
        return _NAMED_MISTRAL if "[ARGS]" in added and self.syntax.opening == _NAMED_MISTRAL.opening else self.syntax

    def form_for(self, uses: ToolUse) -> CallFormat:
        """How the calls of an answer are found. Where strict ones are free to come and are written without a marker,
        the answer's grammar (`CallGrammar.free`) covers only those that it begins with.
        """
        unmarked = uses.choice == "auto" and not self.syntax.opening and any(tool.strict for tool in uses.tools)
        return replace(self.form, openings=()) if unmarked else self.form


@dataclass(frozen=True, kw_only=True)
class Families:
    """Those of a model; None: its tool calls or its reasoning are not looked for."""

    tools: ToolFamily | None
    reasoning: ReasoningFormat | None


def _json_reader(accepts: Callable[[str], bool], _first: str) -> CallReader:
    return JsonCallReader(accepts)


_MISTRAL_HEADER = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
_DEEPSEEK_NAME = "<\uff5ctool▁sep\uff5c>"
_DEEPSEEK_HEADER = re.compile(rf"\s*(?:function\s*{_DEEPSEEK_NAME})?\s*([\w.-]+)\s*(?:{_DEEPSEEK_NAME}\s*|```json\s*)?")


def _mistral_reader(accepts: Callable[[str], bool], first: str) -> CallReader:
    return JsonCallReader(accepts) if first in "{[" else NamedCallReader(_MISTRAL_HEADER, accepts)


def _deepseek_reader(accepts: Callable[[str], bool], _first: str) -> CallReader:
    return NamedCallReader(_DEEPSEEK_HEADER, accepts)


_JSON_HEAD, _JSON_TAIL = '{"name": "NAME", "arguments": ', "}"
_NAMED_MISTRAL = CallSyntax(opening="[TOOL_CALLS]", head="NAME[ARGS]", tail="", between=None)

TOOL_FAMILIES: dict[str, ToolFamily] = {
    "hermes": ToolFamily(
        form=CallFormat(openings=("<tool_call>",), closings=("</tool_call>", "}"), reader=_json_reader),
        syntax=CallSyntax(
            opening="<tool_call>",
            head=f"\n{_JSON_HEAD}",
            tail=f"{_JSON_TAIL}\n",
            between=None,
            closing="</tool_call>",
        ),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": ToolFamily(
        form=CallFormat(
            openings=("<|python_tag|>",),
            closings=(";", ",", "]", "}"),
            reader=_json_reader,
            lists=True,
            bare=True,
        ),
        syntax=CallSyntax(head='{"name": "NAME", "parameters": ', tail="}", between="; "),
        markers=("<|python_tag|>",),
    ),
    "mistral": ToolFamily(
        form=CallFormat(openings=("[TOOL_CALLS]",), closings=("]", ","), reader=_mistral_reader, lists=True),
        syntax=CallSyntax(
            opening="[TOOL_CALLS]", lead="[", head=_JSON_HEAD, tail=_JSON_TAIL, between=", ", closing="]"
        ),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        short_ids=True,
    ),
    "phi4_mini_json": ToolFamily(
        form=CallFormat(
            openings=("<|tool_call|>",), closings=("<|/tool_call|>", "]", ","), reader=_json_reader, lists=True
        ),
        syntax=CallSyntax(
            opening="<|tool_call|>",
            lead="[",
            head=_JSON_HEAD,
            tail=_JSON_TAIL,
            between=", ",
            closing="]<|/tool_call|>",
        ),
        markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "deepseek_v3": ToolFamily(
        form=CallFormat(
            openings=(_DEEPSEEK_CALL, _DEEPSEEK_CALLS + _DEEPSEEK_CALL),
            closings=("```", _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
            reader=_deepseek_reader,
        ),
        syntax=CallSyntax(
            opening=_DEEPSEEK_CALLS,
            head=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_NAME}NAME\n```json\n",
            tail=f"\n```{_DEEPSEEK_CALL_END}",
            between="\n",
            closing=_DEEPSEEK_CALLS_END,
        ),
        markers=(_DEEPSEEK_CALLS, _DEEPSEEK_CALL, _DEEPSEEK_NAME, _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
    ),
    "json": ToolFamily(
        form=CallFormat(
            openings=("```json",),
            closings=("```", ";", ",", "]", "}"),
            reader=_json_reader,
            lists=True,
            bare=True,
            known=True,
        ),
        syntax=CallSyntax(head=_JSON_HEAD, tail=_JSON_TAIL, between="; "),
    ),
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(opening="<think>", closing="</think>"),
    "deepseek_r1": ReasoningFormat(opening="<think>", closing="</think>", assumed=True),
    "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]"),
}


def families_of(model: ModelSpec, template: ChatTemplate | None) -> Families:
    """How a model writes calls and reasoning: as it was registered, else as its chat template shows.

    Raises:
        ModelLoadError: this node does not know the parser that the model names.
    """
    tools = model.tool_parser or _tool_parser(template)
    reasoning = model.reasoning_parser or _reasoning_parser(template)
    return Families(
        tools=_named(tools, TOOL_FAMILIES, "tool_parser"),
        reasoning=_named(reasoning, REASONING_FORMATS, "reasoning_parser"),
    )


def _named(name: str, known: Mapping[str, T], field: str) -> T | None:
    if name == "none":
        return None
    if name not in known:
        raise ModelLoadError(f"{field} must be one of {', '.join(known)} and none, not {name}", param=field)
    return known[name]


def _tool_parser(template: ChatTemplate | None) -> ToolParserName:
    source = "" if template is None else template.tool_source
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if _DEEPSEEK_CALL in source:
        return "deepseek_v3"
    if "<tool_call>" in source:
        return "hermes"
    if "<|tool_call|>" in source:
        return "phi4_mini_json"
    if "<|python_tag|>" in source or "Environment: ipython" in source:
        return "llama3_json"
    return "json"


def _reasoning_parser(template: ChatTemplate | None) -> ReasoningParserName:
    source = "" if template is None else template.source
    if "</think>" in source:
        return "qwen3"
    return "mistral" if "[/THINK]" in source else "none"
