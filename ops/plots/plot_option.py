"""The option `--plot` of commands that draw when their work is done."""

from pathlib import Path

import typer

from ops.plots.panels import PlotError, check_path


def check_plot(plot: Path | None) -> None:
    """See that the picture can be written, before long work is done for it.

    Raises:
        typer.BadParameter: it cannot.
    """
    try:
        if plot is not None:
            check_path(plot)
    except PlotError as error:
        raise typer.BadParameter(str(error), param_hint="--plot") from error
