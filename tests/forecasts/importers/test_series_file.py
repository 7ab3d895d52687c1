from pathlib import Path

import numpy as np
import pytest

from forecasts.importers.lines import DemandFileError
from forecasts.importers.series_file import EndpointSeries, read_series

HEADER = "start_s,region,model,tokens_per_s\n"


def series_of(folder: Path, *lines: str) -> list[EndpointSeries]:
    path = folder / "demand.csv"
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return read_series(path)


def test_rows_in_any_order_make_series_with_buckets_of_their_own(tmp_path: Path) -> None:
    lines = ["1200,us,b,3", "180,us,a,7", "60,us,a,5", "0,us,b,1", "600,us,b,", "300,us,a,0"]
    a, b = series_of(tmp_path, *lines)
    assert (a.region, a.model, a.series.start_s, a.series.bucket_s) == ("us", "a", 60, 120)
    np.testing.assert_array_equal(a.series.values, [5, 7, 0])
    assert (b.model, b.series.start_s, b.series.bucket_s) == ("b", 0, 600)
    np.testing.assert_array_equal(b.series.values, [1, np.nan, 3])


def test_what_has_no_row_is_a_gap(tmp_path: Path) -> None:
    (found,) = series_of(tmp_path, "0,us,a,1", "60,us,a,1", "240,us,a,1")
    np.testing.assert_array_equal(found.series.values, [1, 1, np.nan, np.nan, 1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no demand"),
        (("0,us,a,1",), "a in us: line 2: one row does not define the bucket width"),
        (("0,us,a,1", "60,us,a,1", "0,us,a,2"), "a in us: line 4: column start_s 0 is repeated, first in line 2"),
        (("0,us,a,1", "60,us,a,1", "130,us,a,2"), "line 4: column start_s 130 is off the grid of 60 s"),
        (("0,us,a,1", "1,us,a,1", "5e6,us,a,2"), r"line 4: column start_s 5000000 makes 5e\+06 buckets of 1 s, over"),
        (
            [f"{t},us,a,1" for t in (*range(0, 600, 60), *range(600, 6000, 300))],
            "line 12: from start_s 600 on rows are 300 s apart, others 60 s",
        ),
        (
            [f"{t},us,a,1" for t in (*range(0, 108_000, 3600), 54_001)],
            "line 2: from start_s 0 on rows are 3600 s apart, others 1 s",
        ),
    ],
)
def test_what_makes_no_series_is_named(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(DemandFileError, match=message):
        series_of(tmp_path, *lines)
