"""`cli.md`: every command with its options and examples, from the command line's own tree."""

import textwrap
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from ops.cli.main import app
from ops.reference.markdown import block, code, page, plain, table

_INTRODUCTION = """\
Every command has `--help`. Exit status: 0 done, 1 refused or failed, 2 wrong usage. Commands that call
the API find its address as `--url` describes, and print JSON with `--json`."""
_AS_IT_STANDS = "\b\n"
"""Begins a paragraph of a help text whose lines are kept."""


def commands_page() -> str:
    """The page."""
    return page("Command line", _INTRODUCTION, *_sections(_without_arguments(get_command(app), "tidepool", None)))


def _without_arguments(command: Any, name: str, parent: Any) -> Any:
    """The context of a command that is not run. Its command is the real one where the given one is imported later."""
    return command.make_context(name, [], parent=parent, resilient_parsing=True)


def _sections(context: Any) -> Iterator[str]:
    """The section of a command, then those of its subcommands."""
    command = context.command
    yield f"## {context.command_path}"
    yield block(" ".join([context.command_path, *command.collect_usage_pieces(context)]))
    yield from _explanation(command.help or "")
    options = [each for each in command.params if each.name != "help"]
    records = [record for each in options if (record := each.get_help_record(context))]
    if records:
        yield table(("option or argument", "meaning"), ((code(names), plain(about)) for names, about in records))
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _sections(_without_arguments(below, name, context))


def _explanation(text: str) -> Iterator[str]:
    """The paragraphs of a help text; examples keep their lines."""
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith(_AS_IT_STANDS):
            yield plain(paragraph)
            continue
        first, _, rest = paragraph.removeprefix(_AS_IT_STANDS).partition("\n")
        if first.endswith(":"):
            yield plain(first)
            yield block(textwrap.dedent(rest))
        else:
            yield block(textwrap.dedent(f"{first}\n{rest}").rstrip())
