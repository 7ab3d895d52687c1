"""A group of commands one of which needs no name."""

from typing import Any

from typer.core import TyperGroup

DEFAULT = "run"


class DefaultCommandGroup(TyperGroup):
    """`GROUP X` is short for `GROUP run X`, unless X is one of the commands or asks for help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command where none is named."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)
