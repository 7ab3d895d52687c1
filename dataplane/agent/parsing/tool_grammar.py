"""The grammar of an answer that must call tools, or that must write their arguments as their schemas say."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.constraints.grammars import free_text_with, json_piece, marker
from dataplane.protocol.messages import Tool

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NAME = "NAME"
_BARE_REST = r"/[ \n\r\t]*[^ \n\r\t{\[](.|\n)*/"
"""Text that begins with no call."""


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How a family's models are trained to write calls: `opening`, `lead`, calls with `between` them, `closing`. One
    call is `head`, in which NAME stands for the name, its arguments, and `tail`. `between` None: each call is opened
    and closed by itself, on a line of its own.
    """

    opening: str = ""
    lead: str = ""
    head: str
    tail: str
    between: str | None
    closing: str = ""

    def text(self, name: str, arguments: str) -> str:
        """One call."""
        return f"{self.opening}{self.lead}{self.head.replace(_NAME, name)}{arguments}{self.tail}{self.closing}"


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """Makes Lark grammars of calls. `schemas`: of the arguments, one for each of the tools. `added`: ids of the
    tokenizer's added tokens, which no text matches.
    """

    syntax: CallSyntax
    tools: Sequence[Tool]
    schemas: Sequence[Mapping[str, Any]]
    added: Mapping[str, int]
    parallel: bool

    def forced(self) -> str:
        """An answer of calls alone."""
        return f"start: {self._calls()}\n{self._rules()}"

    def free(self) -> str:
        """Any text, in which every call is one of these."""
        if self.syntax.opening:
            text = free_text_with("behind_opening", self.syntax.opening, self.added, parallel=self.parallel)
            return f"{text}{self._rules()}"
        return f"start: {self._calls()} | {_BARE_REST} |\n{self._rules()}"

    def or_json(self, schema: Mapping[str, Any]) -> str:
        """Either calls alone or JSON that matches a schema. The calls must have an opening: the library reads the
        beginning of a text in one way only.
        """
        return f"start: {self._calls()} | json_answer\njson_answer: {json_piece(dict(schema))}\n{self._rules()}"

    def _calls(self) -> str:
        opening = self._spelled(self.syntax.opening)
        group = f"{opening} behind_opening".strip()
        more = f' ("\\n" {group})*' if self.parallel and self.syntax.between is None else ""
        return group + more

    def _rules(self) -> str:
        """`behind_opening` and the rules that it needs."""
        syntax = self.syntax
        more = ""
        if self.parallel and syntax.between is not None:
            more = f"({self._spelled(syntax.between)} call)*"
        parts = [self._spelled(syntax.lead), "call", more, self._spelled(syntax.closing)]
        lines = [f"behind_opening: {' '.join(filter(None, parts))}"]
        lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(self.tools))))
        for number, (tool, schema) in enumerate(zip(self.tools, self.schemas, strict=True)):
            head = self._spelled(syntax.head.replace(_NAME, tool.name))
            lines.append(f"call_{number}: {head} arguments_{number} {self._spelled(syntax.tail)}".rstrip())
            lines.append(f"arguments_{number}: {json_piece({**ANY_ARGUMENTS, **schema})}")
        return "\n".join(lines) + "\n"

    def _spelled(self, text: str) -> str:
        """A text as grammar: the added tokens in it as tokens, and the rest as it is."""
        marks = sorted((mark for mark in self.added if mark and mark in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return " ".join(
            marker(part, self.added) if part in self.added else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )
