import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasts.series import DemandSeries

NAN = float("nan")


def series(*values: float, start_s: float = 0.0, bucket_s: float = 60.0) -> DemandSeries:
    return DemandSeries(start_s=start_s, bucket_s=bucket_s, values=np.array(values, dtype=np.float64))


def test_rows_in_any_order_and_what_is_not_named_is_a_gap() -> None:
    made = DemandSeries.from_rows([(180, 4.0), (60, None), (0, 1.0)], end_s=300)
    np.testing.assert_array_equal(made.values, [1.0, NAN, NAN, 4.0, NAN])
    assert (made.start_s, made.end_s, made.duration_s) == (0, 300, 300)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([(0, 1.0), (0, 2.0)], "start_s 0 is repeated"),
        ([(0, 1.0), (90, 2.0)], "start_s 90 is not a multiple of 60.0 s after 0"),
        ([(0, 1.0), (600, 2.0)], "start_s 600 is not before end_s 300"),
    ],
)
def test_rows_that_make_no_series_are_refused(rows: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemandSeries.from_rows(rows, end_s=300)


@pytest.mark.parametrize(
    ("values", "message"), [([1.0, -2.0], r"got -2\.0"), ([np.inf], "got inf"), ([[1.0]], "one dimension, got 2")]
)
def test_bad_values_are_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemandSeries(start_s=0, bucket_s=60, values=np.array(values))
    with pytest.raises(ValueError, match="bucket_s must be positive, got 0"):
        DemandSeries(start_s=0, bucket_s=0, values=np.array([1.0]))


def test_a_series_keeps_its_own_values() -> None:
    values = np.array([1.0, 2.0])
    made = DemandSeries(start_s=0, bucket_s=60, values=values)
    values[0] = 9.0
    assert made.values[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        made.values[0] = 9.0


def test_rebin_counts_back_from_the_end_and_averages_what_is_known() -> None:
    made = series(9, 1, 2, NAN, NAN, NAN, NAN, 5, 7, start_s=60).rebin(120)
    np.testing.assert_array_equal(made.values, [1.5, NAN, NAN, 6.0])
    assert (made.start_s, made.end_s, made.bucket_s) == (120, 600, 120)
    with pytest.raises(ValueError, match="bucket_s 90 is not a whole multiple of 60"):
        series(1, 2).rebin(90)


def test_before_leaves_out_the_bucket_under_way() -> None:
    assert series(1, 2, 3, 4).before(150).values.tolist() == [1, 2]
    assert series(1, 2).before(-50).values.size == 0
    assert series(1, 2).before(999).values.tolist() == [1, 2]


def test_last_hour_max_looks_back_sixty_minutes_and_skips_gaps() -> None:
    assert series(99, *[1] * 30, 7, NAN, *[2] * 28).last_hour_max() == 7
    assert np.isnan(series(99, *[NAN] * 60).last_hour_max())


@given(st.lists(st.floats(0, 1e9) | st.just(NAN), min_size=1, max_size=60), st.integers(1, 7))
def test_rebinning_stays_within_the_values(values: list[float], factor: int) -> None:
    before = series(*values)
    after = before.rebin(60.0 * factor)
    assert after.end_s == before.end_s
    assert len(after.values) == len(values) // factor
    if not np.isnan(after.maximum()):
        assert after.maximum() <= before.maximum() * (1 + 1e-12)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.floats(-100, 2000))
def test_before_has_every_bucket_that_ended(values: list[float], origin_s: float) -> None:
    past = series(*values).before(origin_s)
    count = len(past.values)
    assert past.values.tolist() == values[:count]
    assert count == 0 or past.end_s <= origin_s + 1e-6
    assert count == len(values) or past.end_s + past.bucket_s > origin_s - 1e-6
