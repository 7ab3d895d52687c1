"""Whether an argument list of a unit or a container is one that the command line takes."""

from collections.abc import Sequence
from typing import Any

from typer import TyperException
from typer.core import TyperGroup
from typer.main import get_command

from ops.cli.main import app


def fault_of_command(arguments: Sequence[str]) -> str | None:
    """What the command line would refuse about `tidepool ARGUMENTS`; None: nothing. It runs no command."""
    command: Any = get_command(app)
    context, rest = None, list(arguments)
    while True:
        context = command.make_context("tidepool", [], parent=context, resilient_parsing=True)
        if not isinstance(context.command, TyperGroup):  # the given one may be imported only now
            break
        name, rest = (rest or [""])[0], rest[1:]
        command = context.command.get_command(context, name)
        if command is None:
            return f"there is no command {name!r}"
    try:
        command.make_context("tidepool", rest, parent=context.parent)
    except TyperException as error:
        return error.format_message()
    return None
