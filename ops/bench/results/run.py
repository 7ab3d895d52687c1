"""Make the rows of results that commands make, and check them: `make results`, `make results-check`."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ops.bench.commit import CommitError, commit_of
from ops.bench.marked_table import MarkedTable, PageError
from ops.bench.results.row import DATA, ResultRow
from ops.bench.results.rows import ROWS
from ops.bench.shared import chosen
from ops.client.screen import AsJson, notes, print_json, progress_bar
from ops.reference.markdown import code, table

DOCS = Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "results.md", DOCS / "results.json"
TABLE = MarkedTable("results")
_EXACT = 1e-9
"""By how much of themselves figures that are not timed may differ: sums in another order."""


class KeptRow(BaseModel):
    """What a command's last run said, of which commit, and when."""

    model_config = ConfigDict(extra="forbid")

    command: str
    commit: str
    date: str
    values: dict[str, float]


Kept = dict[str, KeptRow]
Measure = Callable[[ResultRow], Mapping[str, float]]
_DOCUMENT = TypeAdapter(Kept)


class ResultsError(Exception):
    """A command failed, or the file of kept rows cannot be used; the message says which and why."""


def read_kept(file: Path) -> Kept:
    """The kept rows by name; none if there is no file.

    Raises:
        ResultsError: it cannot be read, or is no such file.
    """
    try:
        return _DOCUMENT.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise ResultsError(f"{file}: cannot be used: {error}") from error


def write_kept(file: Path, kept: Kept) -> None:
    """Write the rows by name."""
    document = {name: kept[name].model_dump() for name in sorted(kept)}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measured(data: Path) -> Measure:
    """Runs a row's command on the recordings in `data`. It raises ResultsError where the command fails, or its answer
    lacks what the row reads.
    """

    def measure(row: ResultRow) -> Mapping[str, float]:
        arguments = [argument.replace(DATA, str(data)) for argument in row.arguments]
        done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ResultsError(f"{row.command} ended with status {done.returncode}")
        try:
            return dict(row.values(json.loads(done.stdout)))
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise ResultsError(f"{row.command}: its answer lacks a figure: {error!r}") from error

    return measure


def make_rows(rows: Mapping[str, ResultRow], file: Path, measure: Measure, *, again: bool = False) -> Kept:
    """Run the rows whose commands have not run as they are now, or whose text has figures that are not kept; all if
    `again`. Each is kept as soon as it is made, beside those that another run has made meanwhile.

    Raises:
        ResultsError: a command failed; the rows before it are kept.
    """
    kept = read_kept(file)
    wanted = [name for name in rows if again or name not in kept or not _is_current(rows[name], kept[name])]
    with progress_bar("rows") as report:
        for number, name in enumerate(wanted):
            report(name, number, len(wanted))
            made = _kept(rows[name], measure(rows[name]))
            kept = {**read_kept(file), name: made}
            write_kept(file, kept)
        report("made", len(wanted), len(wanted))
    return kept


def _is_current(row: ResultRow, kept: KeptRow) -> bool:
    try:
        row.cells(kept.values)
    except KeyError:
        return False
    return kept.command == row.command


def _kept(row: ResultRow, values: Mapping[str, float]) -> KeptRow:
    return KeptRow(
        command=row.command,
        commit=commit_of(DOCS, (PAGE.name, KEPT.name)),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        values=dict(values),
    )


def off(row: ResultRow, kept: Mapping[str, float], found: Mapping[str, float]) -> list[str]:
    """The figures that differ by more than the row's tolerance."""
    limit = row.tolerance or _EXACT
    return [
        f"{key} is {found.get(key)}, kept is {kept.get(key)}"
        for key in sorted({*kept, *found})
        if key not in kept or key not in found or abs(found[key] - kept[key]) > limit * abs(kept[key])
    ]


def check_rows(
    rows: Mapping[str, ResultRow], kept: Kept, measure: Measure, *, count: int, seed: int
) -> dict[str, list[str]]:
    """Run a sample of the kept rows again. Returns what differs, by the row's name.

    Raises:
        ResultsError: a command failed, or nothing is kept.
    """
    known = sorted(kept.keys() & rows.keys())
    if not known:
        raise ResultsError("no row is kept: run `make results` first")
    sample = random.Random(seed).sample(known, min(count, len(known)))
    found: dict[str, list[str]] = {}
    with progress_bar("rows") as report:
        for number, name in enumerate(sample):
            report(name, number, len(sample))
            found[name] = off(rows[name], kept[name].values, measure(rows[name]))
        report("checked", len(sample), len(sample))
    return found


def markdown_of(rows: Mapping[str, ResultRow], kept: Kept) -> str:
    """The table of the rows that are kept.

    Raises:
        ResultsError: a row's text has a figure that is not kept.
    """
    head = ("what", "Tidepool", "compared with", "drawn by chance", "command", "made of")
    return table(head, [_line(name, rows[name], kept[name]) for name in rows if name in kept])


def _line(name: str, row: ResultRow, kept: KeptRow) -> Sequence[str]:
    try:
        return (*row.cells(kept.values), code(kept.command), f"{kept.commit}, {kept.date}")
    except KeyError as error:
        raise ResultsError(
            f"row {name}: its text has {error}, which is not kept: make it again, --row {name}"
        ) from error


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    row: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(ROWS)}; all if not given.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also the rows that are kept.")] = False,
    check: Annotated[int, typer.Option(min=0, help="Make nothing: run so many kept rows again, drawn by --seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="By default the day's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the commands whose figures the page of results has, and write them into it; or run some again and compare.

    Rows that are kept are not run again unless their command has changed, so this may be broken off at any time. With
    --check the status is 1 where a figure differs by more than its row allows.

    \b
    Example:
      python -m ops.bench.results.run --data DATA
      python -m ops.bench.results.run --data DATA --check 2
    """
    rows = {name: ROWS[name] for name in chosen(row, ROWS, "--row")}
    measure = measured(data)
    try:
        if check:
            today = datetime.now(UTC).toordinal()
            differing = check_rows(rows, read_kept(KEPT), measure, count=check, seed=today if seed is None else seed)
            _say(differing, as_json)
            raise typer.Exit(any(differing.values()))
        TABLE.split(PAGE)
        kept = make_rows(rows, KEPT, measure, again=again)
        TABLE.write(PAGE, markdown_of(ROWS, kept))
    except (ResultsError, CommitError, PageError) as error:
        notes().print(str(error), markup=False)
        raise typer.Exit(1) from error
    if as_json:
        print_json({name: one.model_dump() for name, one in kept.items()})


def _say(differing: Mapping[str, Sequence[str]], as_json: bool) -> None:
    if as_json:
        print_json(differing)
        return
    for name, figures in differing.items():
        notes().print(f"{name}: {'; '.join(figures) or 'as kept'}", markup=False)


if __name__ == "__main__":
    typer.run(main)
