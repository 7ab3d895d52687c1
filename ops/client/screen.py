"""Output of commands: JSON or tables on standard output, progress on standard error."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else.")]
Progress = Callable[[str, int, int | None], None]
"""Reports what is being done, how much of it is done, and of how much; None: nobody knows."""
Columns = Mapping[str, str | Callable[[Mapping[str, Any]], object]]
"""Header -> the field's name, or what to make of a row."""

PLAIN_WIDTH = 100_000
"""Width of a log or a pipe, in which nothing is folded."""
_PROSE_CHARS = 24
"""A column of longer texts is folded at its spaces, to no less than this; ids, names and numbers are never folded."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def output() -> "Console":
    """The console of answers."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def notes() -> "Console":
    """The console of progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def same(*names: str) -> dict[str, str]:
    """Columns whose headers are the names of their fields."""
    return {name: name for name in names}


@contextmanager
def progress_bar(doing: str, *, in_bytes: bool = False) -> Iterator[Progress]:
    """A progress bar on standard error."""
    from rich import progress

    counts = progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), counts)
    with progress.Progress(*columns, progress.TimeElapsedColumn(), console=notes()) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)


def print_json(answer: Any) -> None:
    """An answer for scripts."""
    typer.echo(json.dumps(answer, ensure_ascii=False, indent=2))


def print_answer(answer: Any, text: str, *, as_json: bool) -> None:
    """Print an answer as JSON, or as a text."""
    if as_json:
        print_json(answer)
    else:
        typer.echo(text)


def print_table(title: str, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table, or field by field where the terminal is too narrow, or one line for no rows."""
    from rich.cells import cell_len
    from rich.markup import escape
    from rich.table import Table

    cells = [
        [_cell(row[column] if isinstance(column, str) else column(row)) for column in columns.values()] for row in rows
    ]
    console = output()
    if not cells:
        console.print(f"{title}: none")
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for at, header in enumerate(columns):
        texts = [row[at] for row in cells]
        folds = any(len(text) > _PROSE_CHARS and " " in text for text in texts)
        words = [header, *(word for text in texts for word in (text.split() if folds else [text]))]
        width = max(_PROSE_CHARS if folds else 0, *map(cell_len, words))
        table.add_column(escape(header), overflow="fold", min_width=width, no_wrap=not folds)
    if sum((column.min_width or 0) + 3 for column in table.columns) + 1 > console.width:
        console.print(f"[italic]{escape(title)}[/]")
        for row in cells:
            console.print(_grid(zip(columns, row, strict=True)), "", sep="\n")
        return
    for row in cells:
        table.add_row(*map(escape, row))
    console.print(table)


def print_list(title: str, columns: Columns, answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a list as the API answers it as JSON, or the rows of its `data` as a table."""
    if as_json:
        print_json(answer)
    else:
        print_table(title, columns, answer["data"])


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Names and values, one a line."""
    output().print(_grid((name, _cell(value)) for name, value in fields))


def _grid(fields: Iterable[tuple[str, str]]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, value in fields:
        grid.add_row(name, escape(value))
    return grid


def bytes_text(count: int) -> str:
    """A number of bytes with a binary unit."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def unplaced_text(row: Mapping[str, Any]) -> str:
    """How many instances cannot be placed, and why."""
    on = "" if row["gpu_type"] is None else f" on {row['gpu_type']}"
    return f"{row['count']}{on}: {row['reason']}"


def time_text(time_s: float | None) -> str:
    """A Unix time in UTC, to the second."""
    return "-" if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
