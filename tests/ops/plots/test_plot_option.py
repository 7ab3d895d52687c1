"""`--plot`: what cannot be drawn to is refused before the work."""

from pathlib import Path

import pytest
import typer

from ops.plots.plot_option import check_plot


def test_a_picture_that_cannot_be_written_is_refused_by_the_options_name(tmp_path: Path) -> None:
    for bad in (tmp_path / "p.txt", tmp_path / "none" / "p.png"):
        with pytest.raises(typer.BadParameter) as caught:
            check_plot(bad)
        assert caught.value.param_hint == "--plot"
        assert str(bad) in caught.value.message
    check_plot(tmp_path / "p.png")
    check_plot(None)
