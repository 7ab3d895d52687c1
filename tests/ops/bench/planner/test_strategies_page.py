"""The table of strategies in the documentation."""

from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter, Typer
from typer.testing import CliRunner

from ops.bench.marked_table import PageError
from ops.bench.planner import strategies
from ops.bench.planner.strategies_page import TABLE, markdown_of

PAGE = Path(__file__).parents[4] / "ops" / "docs" / "results.md"


def row(strategy: str, hours: float, late: float, **distances: tuple[float, bool]) -> dict[str, Any]:
    return {
        "case": "a-day",
        "strategy": strategy,
        "seeds": 3,
        "instance_hours": hours,
        "instance_hours_range": [hours - 1, hours + 1],
        "tail_hours": 3.25,
        "work_hours": 150.0,
        "late": late,
        "late_range": [late, late],
        "late_beyond_idle": None if strategy == "lt-i" else late - 0.03,
        "ttft_p95_s": 1.5,
        "ttft_p95_s_range": [1.5, 1.5],
        "slow_minutes": 7.0,
        "scale_outs": 30.0,
        "redeploys": 2.0,
        "distances": {
            name.replace("_", "-"): {"hours": to, "all_hours": None if strategy == "lt-i" else to, "no_later": no_later}
            for name, (to, no_later) in distances.items()
        },
    }


ROWS = [
    row("reactive", 200.0, 0.08, reactive=(0.0, True), reactive_50_25=(-0.2, False)),
    row("lt-i", 240.0, 0.05, reactive=(0.2, True)),
]


def test_losses_are_bold_and_what_is_later_is_in_brackets() -> None:
    *_, reactive, planned = markdown_of(ROWS).strip().splitlines()
    assert (
        "| 3 | 200.0 (199.0 to 201.0) | 3.2 | 150.0 | +0.0% | (-20.0%) | +0.0% | 8.0 | 5.0 | 1.50 | 7 | 30 | 2 |"
        in reactive
    )
    assert reactive.startswith("| `a-day` | Reactive 70/30")
    assert "| **240.0 (239.0 to 241.0)** | 3.2 | 150.0 | +20.0% | - | - | 5.0 | - |" in planned


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{TABLE.begin}\nold\n{TABLE.end}\nafter\n")
    TABLE.write(page, markdown_of(ROWS))
    once = page.read_text()
    assert once.startswith(f"before\n{TABLE.begin}\n")
    assert once.endswith(f"\n{TABLE.end}\nafter\n")
    assert "old" not in once
    TABLE.write(page, markdown_of(ROWS))
    assert page.read_text() == once


def test_a_page_without_marks_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{TABLE.end}\n{TABLE.begin}\n")
    with pytest.raises(PageError, match="needs the lines"):
        TABLE.write(page, markdown_of(ROWS))
    commands = Typer()
    commands.command()(strategies.main)
    given = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--markdown", str(page)]
    assert CliRunner().invoke(commands, given).exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_the_page_of_results_has_a_place_for_it() -> None:
    text = PAGE.read_text()
    assert text.count(TABLE.begin) == text.count(TABLE.end) == 1


def test_a_run_that_does_not_say_which_it_is_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a-day-reactive-1.json").write_text('{"digest": "0", "instance_hours": 1.0}')
    with pytest.raises(BadParameter, match=r"a-day-reactive-1\.json does not name its case, variant and seed"):
        strategies.kept_rows(tmp_path)


def test_the_page_of_results_shows_what_the_kept_runs_say(tmp_path: Path) -> None:
    page = tmp_path / PAGE.name
    page.write_text(PAGE.read_text())
    TABLE.write(page, markdown_of(strategies.kept_rows(strategies.RUNS)))
    assert page.read_text() == PAGE.read_text(), "write it: python -m ops.bench.planner.strategies --kept --markdown"
