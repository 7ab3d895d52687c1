"""The rows of results that commands make: kept as made, shown as kept, and checked by running again."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from ops.bench.results import run
from ops.bench.results.row import ResultRow
from ops.bench.results.rows import ROWS
from ops.bench.results.run import (
    KEPT,
    PAGE,
    TABLE,
    ResultsError,
    check_rows,
    make_rows,
    markdown_of,
    measured,
    off,
    read_kept,
)


def row(argument: str = "1", *, tolerance: float = 0.0) -> ResultRow:
    """Prints what is given, as JSON."""
    return ResultRow(
        what="numbers, {n:.0f} of them",
        arguments=("-c", "import sys; print(sys.argv[1])", argument),
        values=lambda answer: {"n": answer},
        text="{n:.1f}",
        against="others",
        tolerance=tolerance,
    )


def test_the_page_says_what_the_commands_of_today_said() -> None:
    kept = read_kept(KEPT)
    assert kept.keys() == ROWS.keys()
    assert {name: one.command for name, one in kept.items()} == {name: one.command for name, one in ROWS.items()}
    _, shown, _ = TABLE.split(PAGE)
    assert shown == markdown_of(ROWS, kept)


def test_a_row_runs_once_unless_its_command_changes_or_all_are_asked_for(tmp_path: Path) -> None:
    ran: list[str] = []

    def measure(row: ResultRow) -> Mapping[str, float]:
        ran.append(row.arguments[-1])
        return {"n": float(row.arguments[-1])}

    file, rows = tmp_path / "kept.json", {"a": row("1"), "b": row("2")}
    make_rows(rows, file, measure)
    kept = make_rows(rows, file, measure)
    assert (ran, kept["b"].values) == (["1", "2"], {"n": 2.0})
    make_rows(rows | {"b": row("3")}, file, measure)
    assert ran == ["1", "2", "3"]
    make_rows(rows, file, measure, again=True)
    assert ran == ["1", "2", "3", "1", "2"]
    assert markdown_of(rows, read_kept(file)).endswith(f"{kept['b'].commit}, {kept['b'].date} |")


def test_a_row_whose_text_has_a_figure_that_is_not_kept_runs_again_and_is_named_until_then(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    kept = make_rows({"a": row()}, file, lambda _: {"old": 1.0, "n": 1.0})
    more = {"a": replace(row(), text="{new:.1f}")}
    with pytest.raises(ResultsError, match="row a: its text has 'new', which is not kept: make it again, --row a"):
        markdown_of(more, kept)
    assert make_rows(more, file, lambda _: {"new": 2.0, "n": 1.0})["a"].values == {"new": 2.0, "n": 1.0}


def test_what_was_made_before_a_command_failed_is_kept(tmp_path: Path) -> None:
    file, rows = tmp_path / "kept.json", {"a": row("5"), "b": row("no number")}
    with pytest.raises(ResultsError, match="its answer lacks a figure"):
        make_rows(rows, file, measured(tmp_path))
    assert {name: one.values for name, one in read_kept(file).items()} == {"a": {"n": 5}}


def test_rows_that_another_run_makes_meanwhile_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"

    def measure(_: ResultRow) -> Mapping[str, float]:
        make_rows({"other": row("2")}, file, lambda _: {"n": 2.0})
        return {"n": 1.0}

    assert make_rows({"own": row("1")}, file, measure).keys() == {"other", "own"} == read_kept(file).keys()


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    failing = ResultRow(what="", arguments=("-c", "raise SystemExit(3)"), values=dict, text="", against="")
    with pytest.raises(ResultsError, match=r"python -c raise SystemExit\(3\) ended with status 3"):
        measured(tmp_path)(failing)


def test_the_folder_of_recordings_is_put_in_and_not_shown(tmp_path: Path) -> None:
    reading = ResultRow(
        what="",
        arguments=("-c", "import sys, json; print(json.dumps(len(sys.argv[1])))", "{data}/file"),
        values=lambda answer: {"n": answer},
        text="",
        against="",
    )
    assert measured(tmp_path)(reading) == {"n": len(str(tmp_path / "file"))}
    assert reading.command.endswith("DATA/file")


@pytest.mark.parametrize(
    ("tolerance", "found", "differs"),
    [(0.0, 100.0, False), (0.0, 100.1, True), (0.2, 119.0, False), (0.2, 121.0, True), (0.2, 79.0, True)],
)
def test_a_figure_that_differs_by_more_than_its_tolerance_is_told(
    tolerance: float, found: float, differs: bool
) -> None:
    assert bool(off(row(tolerance=tolerance), {"n": 100.0}, {"n": found})) == differs


def test_a_figure_that_is_gone_or_new_is_told() -> None:
    assert off(row(), {"n": 1.0}, {"m": 1.0}) == ["m is 1.0, kept is None", "n is None, kept is 1.0"]


def test_a_sample_is_checked(tmp_path: Path) -> None:
    rows = {name: row(str(number)) for number, name in enumerate("abcd")}
    kept = make_rows(rows, tmp_path / "kept.json", measured(tmp_path))
    assert check_rows(rows, kept, measured(tmp_path), count=2, seed=1).keys() < rows.keys()
    kept["a"].values["n"] = 7.0
    differing = check_rows(rows, kept, measured(tmp_path), count=9, seed=1)
    assert {name for name, figures in differing.items() if figures} == {"a"}
    with pytest.raises(ResultsError, match="no row is kept"):
        check_rows(rows, {}, measured(tmp_path), count=1, seed=1)


def test_a_row_names_its_figures_wherever_it_shows_them() -> None:
    one = ResultRow(
        what="{n:.0f} things", arguments=(), values=dict, text="{n:.1f}", against="{m:.0f} others", drawn="seed 1"
    )
    assert one.cells({"n": 2.0, "m": 3.0}) == ("2 things", "2.0", "3 others", "seed 1")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    file.write_text(json.dumps({"a": {"command": "c"}}))
    with pytest.raises(ResultsError, match="cannot be used"):
        read_kept(file)


def test_the_command_makes_checks_and_says_what_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, file = tmp_path / "page.md", tmp_path / "kept.json"
    page.write_text(f"before\n{TABLE.begin}\n{TABLE.end}\nafter\n")
    rows: dict[str, Any] = {"a": row("4")}
    for name, value in {"ROWS": rows, "PAGE": page, "KEPT": file}.items():
        monkeypatch.setattr(run, name, value)
    app = Typer()
    app.command()(run.main)
    given = ["--data", str(tmp_path)]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert "| numbers, 4 of them | 4.0 | others |" in page.read_text()
    assert CliRunner().invoke(app, [*given, "--check", "1"]).exit_code == 0
    file.write_text(file.read_text().replace("4.0", "5.0"))
    outcome = CliRunner().invoke(app, [*given, "--check", "1", "--json"])
    assert (outcome.exit_code, json.loads(outcome.stdout)) == (1, {"a": ["n is 4, kept is 5.0"]})
    page.write_text("without marks")
    assert CliRunner().invoke(app, [*given, "--again"]).exit_code == 1
