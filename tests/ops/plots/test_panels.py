from pathlib import Path

import numpy as np
import pytest

from ops.plots.panels import Curve, PlotError, check_path, new_figure, save, with_gaps


def test_missing_buckets_break_the_line_and_the_last_bucket_has_its_width() -> None:
    curve = Curve(start_s=np.array([0.0, 60.0, 240.0]), tokens_per_s=np.array([1.0, 2.0, 3.0]), bucket_s=60.0)
    start_s, rates = with_gaps(curve)
    np.testing.assert_array_equal(start_s, [0, 60, 120, 240, 300])
    np.testing.assert_array_equal(rates, [1, 2, np.nan, 3, 3])


def test_where_no_picture_can_be_is_said_before_the_work(tmp_path: Path) -> None:
    check_path(tmp_path / "a.PNG")
    with pytest.raises(PlotError, match=r"must end in one of \.png, \.svg, \.pdf"):
        check_path(tmp_path / "a.csv")
    with pytest.raises(PlotError, match="does not exist"):
        check_path(tmp_path / "none" / "a.png")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    figure, _ = new_figure(1, "$ no maths _{")
    with pytest.raises(PlotError, match=r"a\.png: cannot be drawn"):
        save(figure, tmp_path / "a.png")
