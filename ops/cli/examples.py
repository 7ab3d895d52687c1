"""Examples of a command, which end its help text."""

import inspect
from collections.abc import Callable
from typing import TypeVar

Command = TypeVar("Command", bound=Callable[..., None])


def examples(*lines: str) -> Callable[[Command], Command]:
    """Append command lines to the docstring of a command, from which its help text is made."""

    def described(command: Command) -> Command:
        title = "Example" if len(lines) == 1 else "Examples"
        shown = "".join(f"\n  {line}" for text in lines for line in text.splitlines())
        command.__doc__ = f"{inspect.getdoc(command)}\n\n\b\n{title}:{shown}"
        return command

    return described
