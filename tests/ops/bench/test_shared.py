"""What benchmarks share: options are checked before the work."""

from pathlib import Path

import pytest
import typer

from ops.bench.shared import check_plot, chosen


def test_names_of_options_are_all_by_default_and_known() -> None:
    assert chosen(None, ("a", "b"), "--case") == ["a", "b"]
    assert chosen(["b"], ("a", "b"), "--case") == ["b"]
    with pytest.raises(typer.BadParameter, match="c is none of a, b"):
        chosen(["c"], ("a", "b"), "--case")


def test_a_picture_that_cannot_be_written_is_refused_by_the_options_name(tmp_path: Path) -> None:
    for bad in (tmp_path / "p.txt", tmp_path / "none" / "p.png"):
        with pytest.raises(typer.BadParameter, match=bad.name) as caught:
            check_plot(bad)
        assert caught.value.param_hint == "--plot"
    check_plot(tmp_path / "p.png")
    check_plot(None)
