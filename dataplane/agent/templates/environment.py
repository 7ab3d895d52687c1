"""The Jinja environment of chat templates, as transformers defines it: filters, functions and the `generation` tag.

It is a sandbox, but Jinja's sandbox limits neither time nor memory: `process.py` does.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TEMPLATES_MAX = 256


class RefusalError(TemplateError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise RefusalError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=_TEMPLATES_MAX)
def compiled(source: str) -> Template:
    """The compiled template.

    Raises:
        jinja2.TemplateSyntaxError: it is no template.
    """
    return _ENVIRONMENT.from_string(source)


def free_variables(source: str) -> tuple[str, ...]:
    """The names that a template reads and does not define; raises as `compiled` does."""
    known = _ENVIRONMENT.globals.keys()
    return tuple(sorted(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)) - known))
