import json
import math

import numpy as np
import pytest

from forecasts.selection.past import LOSS_MAX, Fitted, PastPeaks, SeriesState
from tests.forecasts.demand import hourly


def past_of(*peaks: tuple[float, float | None]) -> PastPeaks:
    """Hourly origins from 0: pairs of actual peak and forecast of "x", None if it declined; "y" forecasts 10."""
    past = PastPeaks()
    for hour, (_, peak) in enumerate(peaks):
        each = {"y": 10.0} if peak is None else {"y": 10.0, "x": peak}
        past = past.with_origin(3600.0 * hour, raw=each, median=each, upper=each, memory=200)
    return past.scored(hourly(*(actual for actual, _ in peaks)), 3600.0, 300.0)


def test_the_actual_peak_is_filled_in_when_the_hour_is_over() -> None:
    past = PastPeaks()
    for hour in range(3):
        past = past.with_origin(3600.0 * hour, raw={}, median={"x": 5.0}, upper={}, memory=100)
    series = hourly(7.0, np.nan, 9.0)
    first = past.scored(series.before(3600), 3600.0, 300.0)
    np.testing.assert_array_equal(first.actual, [7, np.nan, np.nan])
    second = first.scored(series, 3600.0, 300.0)  # the hour of the gap is dropped
    assert second.origins_s.tolist() == [0, 7200]
    assert second.actual.tolist() == [7, 9]
    assert len(first.known().actual) == 1


def test_the_error_is_weighted_and_uses_the_fallback_for_declined_forecasts() -> None:
    past = past_of((10, 20), (10, 15), (10, None))
    weights = 0.5 ** (np.array([2, 1, 0]) / 6)
    short = weights @ [1.0, 0.5, 0.0] / weights.sum()
    assert past.error("x", "y", 1e9) == pytest.approx(0.8 * 0.5 + 0.2 * short)
    assert past.error("x", "y", 6.0) == pytest.approx(short)
    assert past.error("z", "y", 1.0) is None
    assert past_of((0, 0)).error("x", "y", 1.0) == 0
    assert past_of((0, 3)).error("x", "y", 1.0) == LOSS_MAX


def test_an_error_is_relative_to_the_scale_of_its_own_hour() -> None:
    """Misses by half count the same at 1,000 and, three days after a collapse, at 1."""
    before, after = [(1000.0, 500.0)] * 24, [(1.0, 0.5)] * 144
    assert past_of(*before).error("x", "y", 48.0) == pytest.approx(0.5)
    past = past_of(*before, *after)
    assert past.scales[[0, 23]] == pytest.approx([1000, 1000])
    assert past.scales[-1] < 12
    assert past_of(*after).error("x", "y", 48.0) == pytest.approx(0.5)
    assert (
        past_of(*before, *[(1.0, 1000.0)] * 2).error("x", "y", 48.0) > 0.55
    )  # who does not follow is known in 2 hours


def test_floors_are_a_thousandth_of_the_day_before_so_that_zero_has_a_logarithm() -> None:
    past = past_of((100, 100), *[(0, 0)] * 24, (0.1, 0))
    assert past.floors[[0, 23, 24, 25]] == pytest.approx([0.1, 0.1, 1e-9, 1e-4])
    assert past.floored_log_ratios("x")[[0, 1]].tolist() == [0, 0]
    assert past.floored_log_ratios("x")[25] == pytest.approx(math.log(1001))
    assert PastPeaks().floor == 1e-9


def test_a_shift_is_a_first_peak_beyond_every_forecast() -> None:
    usual = [(10.0, 9.0)] * 50
    assert past_of(*usual, (31.0, 9.0)).is_shifted
    assert past_of(*usual, (3.0, 9.5)).is_shifted
    assert past_of(*usual, (31.0, None)).is_shifted  # who declined has no say
    assert not past_of(*usual, (31.0, 11.0)).is_shifted  # one came near
    assert not past_of(*usual, (29.0, 9.0)).is_shifted
    assert not past_of(*usual, (31.0, 9.0), (10.0, 9.0)).is_shifted  # it is the newest that counts
    assert not past_of((31.0, 9.0), *usual, (31.0, 9.0)).is_shifted  # the second that is remembered
    assert not PastPeaks().is_shifted


def test_ratios_are_of_what_is_above_zero() -> None:
    ratios = past_of((10, 20), (0, 15), (40, None), (9, 0)).log_ratios({"x": np.array([20, 15, np.nan, 0])}, "x")
    assert ratios[0] == pytest.approx(math.log(0.5))
    assert np.isnan(ratios[1:]).all()


def test_the_same_origin_again_replaces_and_the_oldest_are_forgotten() -> None:
    past = PastPeaks()
    for origin_s, peak in ((0.0, 1.0), (3600.0, 2.0), (3600.0, 3.0), (7200.0, 4.0)):
        past = past.with_origin(origin_s, raw={"x": peak}, median={"x": peak}, upper={}, memory=2)
    assert past.origins_s.tolist() == [3600, 7200]
    assert past.median["x"].tolist() == [3, 4]


def test_a_state_comes_back_from_json_as_it_was() -> None:
    fitted = {"x": Fitted(params={"a": [1, 2]}, failure=None, fitted_s=1.0, selected_s=0.0, selected_from_s=3.0)}
    state = SeriesState(
        origin_s=5.0, champion="x", past=past_of((10, 20.123456789), (5, None)), fitted=fitted, level={"x": 0.9}
    )
    stored = json.loads(json.dumps(state.to_json()))
    assert SeriesState.from_json(stored).to_json() == stored
    assert stored["said"]["x"] == [20.1235, None]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"version": 2}, "version must be 1"), ({"fitted": {"x": {}}}, "lacks or mistypes"), ({"said": 3}, "lacks")],
)
def test_what_is_no_state_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SeriesState.from_json({**SeriesState().to_json(), **change})
