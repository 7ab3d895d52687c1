"""`tidepool`: every process of the system, and commands that talk to its API."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ops.cli.command_table import CommandTable
from ops.cli.extras import missing_extra
from ops.client.api import CommandError, Target

app = typer.Typer(
    name="tidepool",
    cls=CommandTable,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from ops.version import version_text

        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            help="Where the API is; default: TIDEPOOL_URL, else http://127.0.0.1:TIDEPOOL_PORT, else that of the"
            " `tidepool up` of TIDEPOOL_HOME, else port 8080."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="API key; default: TIDEPOOL_ADMIN_KEY, else the admin key of TIDEPOOL_HOME/keys.json."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Tidepool serves many LLMs on one fleet of GPUs over several regions.

    \b
    Examples:
      tidepool demo                               run the main job once, end to end
      tidepool up                                 run everything on this machine
      tidepool init --migrate                     the first keys, for processes that run apart
      tidepool model add qwen3-8b --path /models/qwen3-8b --tokens-per-s H800=12000 --region us-east
      tidepool batch submit requests.jsonl -o results.jsonl
      tidepool plan dry-run                       what the coming hour needs, and why
      tidepool status --json                      every command that asks the API takes --json
    """
    context.obj = Target(url=url, key=key)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exit status: 0 well, 1 refused or failed, 2 used wrongly."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="tidepool")
    except (CommandError, ModuleNotFoundError) as error:
        message = missing_extra(error) if isinstance(error, ModuleNotFoundError) else str(error)
        if message is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(1) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
