"""What commands show: JSON for scripts on standard output, tables for people, progress on standard error."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else.")]
Columns = Mapping[str, str | Callable[[Mapping[str, Any]], object]]
"""Header -> the field's name, or what to make of a row."""

PLAIN_WIDTH = 132
"""Columns where nobody looks at a terminal: a log or a pipe."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def output() -> Console:
    """Where answers go."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def notes() -> Console:
    """Where progress and remarks go."""
    return Console(stderr=True, highlight=False)


def print_json(answer: Any) -> None:
    """An answer for scripts."""
    typer.echo(json.dumps(answer, ensure_ascii=False, indent=2))


def print_table(title: str, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows by columns; a line that says so where there are none."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for header in columns:
        table.add_column(header, overflow="fold")
    count = 0
    for row in rows:
        table.add_row(*(_cell(row[column] if isinstance(column, str) else column(row)) for column in columns.values()))
        count += 1
    if count:
        output().print(table)
    else:
        output().print(f"{title}: none")


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Names and values, one a line."""
    table = Table.grid(padding=(0, 2))
    for name, value in fields:
        table.add_row(f"[bold]{name}[/]", _cell(value))
    output().print(table)


def bytes_text(count: int) -> str:
    """A number of bytes as people read it."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def time_text(time_s: float | None) -> str:
    """A Unix time as people read it, in UTC."""
    return "-" if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape(", ".join(str(one) for one in value))
    return f"{value:,.6g}" if isinstance(value, float) else escape(str(value))
