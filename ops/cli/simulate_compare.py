"""`simulate compare`: two results side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.examples import examples
from ops.client.api import CommandError
from ops.client.screen import AsJson, output, print_json, print_table

if TYPE_CHECKING:
    from ops.simulator.results.compare import Line

Report = Annotated[Path | None, typer.Option("--report", dir_okay=False, help="Write an HTML page with plots here.")]


@examples("tidepool simulate compare lt-i.json lt-u.json --report difference.html")
def compare_results(
    a: Annotated[Path, typer.Argument(help="What `tidepool simulate --json` wrote.", dir_okay=False)],
    b: Annotated[Path, typer.Argument(help="Another.", dir_okay=False)],
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Compare two simulations: every figure of both, and how the second differs.

    \b
    Green is better, red is worse. Differences of percentages are in points (pt).
    """
    from ops.plots.pages import PageError, write_page
    from ops.simulator.results.compare import about, compare, compare_page
    from ops.simulator.results.results import ResultError, read_result

    names = (a.stem, b.stem) if a.stem != b.stem else (str(a), str(b))
    try:
        results = read_result(a), read_result(b)
        if report:
            write_page(report, compare_page(names, *results))
    except (ResultError, PageError) as error:
        raise CommandError(str(error)) from error
    lines = compare(*results)
    if not as_json:
        for name, result in zip(names, results, strict=True):
            output().print(f"{name}: {about(result)}, event log {result.event_log_hash}", markup=False)
    print_lines(names, lines, as_json=as_json)
    if report and not as_json:
        output().print(f"report: {report}", markup=False)


def print_lines(names: tuple[str, str], lines: "Sequence[Line]", *, as_json: bool) -> None:
    """Figures of two runs, and how they differ."""
    if as_json:
        print_json({"a": names[0], "b": names[1], "figures": [line.document() for line in lines]})
        return
    columns = ("name", "a", "b", "difference", "share")
    print_table(
        f"{names[0]} and {names[1]}",
        dict(zip(("", *names, "difference", "share"), columns, strict=True)),
        [dict(zip(columns, (line.name, *line.texts()), strict=True)) for line in lines],
    )
