"""Tables at the width of a terminal, and in a pipe: ids stay whole."""

import pytest

from ops.client import screen
from ops.client.screen import print_fields, print_table

PLAN = "plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"
INSTANCE = "inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"
WHY = "demand rises to 1,200 tokens/s in the hour, and its home region has no more GPUs than these"
ROW = {"plan": PLAN, "instance": INSTANCE, "model": "Qwen/Qwen3-Coder-30B-A3B-Instruct", "why": WHY}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output as wide as a terminal of 80 columns."""
    monkeypatch.setattr(screen, "PLAIN_WIDTH", 80)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", [("plan", "why"), ("plan", "model", "why"), ("plan", "instance", "model", "why")])
def test_ids_are_whole_in_a_terminal_of_80_columns(
    columns: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    print_table("Things", {name: name for name in columns}, [ROW, ROW])
    shown = capsys.readouterr().out
    for name in set(columns) - {"why"}:
        assert shown.count(ROW[name]) == 2, name
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


@pytest.mark.usefixtures("terminal")
def test_a_row_too_wide_for_the_terminal_is_shown_field_by_field(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Things", {"plan": "plan", "instance": "instance", "why": "why"}, [ROW])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["plan", PLAN] in [[part.strip() for part in line] for line in lines]
    assert ["instance", INSTANCE] in [[part.strip() for part in line] for line in lines]


def test_nothing_is_folded_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table("Things", {name: name for name in ROW}, [ROW])
    assert any(all(value in line for value in ROW.values()) for line in capsys.readouterr().out.splitlines())
    print_fields([("why", WHY * 9)])
    assert WHY * 9 in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_a_long_word_of_a_field_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields([("digest", "0123456789" * 9), ("why", WHY)])
    digest, _, _ = capsys.readouterr().out.replace("digest", "").partition("why")
    assert "".join(digest.split()) == "0123456789" * 9
