import numpy as np
import pytest

from forecasts.backtest import backtest, origins_of, upper_ratio
from forecasts.baselines import last_hour_max_path
from forecasts.series import DemandSeries, FloatArray


def hourly(*peaks: float) -> DemandSeries:
    """Five-minute buckets; each hour is at its given value throughout."""
    return DemandSeries(start_s=0, bucket_s=300, values=np.repeat(np.array(peaks, dtype=np.float64), 12))


def test_error_and_coverage_of_the_last_hours_maximum() -> None:
    """Said 10, 20, 20 and 40 came as 20, 20, 40, 10: missed 10 + 0 + 20 + 30 of 90; one was above, one equal."""
    history = hourly(10, 20, 20, 40, 10)
    origins = origins_of(history, windows=12, train=12, count_max=4)
    assert list(origins) == [3600, 7200, 10_800, 14_400]
    score = backtest(history, "x", last_hour_max_path, origins=origins, windows=12, quantile=0.9)
    assert [(each.forecast, each.actual) for each in score.outcomes] == [(10, 20), (20, 20), (20, 40), (40, 10)]
    assert score.weighted_error == pytest.approx(60 / 90)
    assert score.coverage == 0.5
    assert score.ratios().tolist() == [2, 1, 2, 0.25]


def test_the_upper_ratio_is_a_conformal_rank() -> None:
    ratios = np.arange(1.0, 20.0)  # 19 ratios: rank ceil(20 * 0.9) = 18
    assert upper_ratio(ratios, 0.9) == 18
    assert upper_ratio(np.array([3.0, 1.0]), 0.9) == 3  # too few for the rank: the largest


def test_calibrated_coverage_leaves_the_judged_origin_out() -> None:
    history = hourly(10, 10, 10, 10, 10, 30)  # only the last hour exceeds what the others would allow
    origins = origins_of(history, windows=12, train=12, count_max=5)
    score = backtest(history, "x", last_hour_max_path, origins=origins, windows=12, quantile=0.9)
    assert score.calibrated_coverage == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("buckets", "train", "count_max", "expected"),
    [
        (23, 12, 24, []),  # no room for a window after the training
        (24, 12, 24, [12]),
        (48, 24, 24, list(range(24, 37))),  # 12 buckets of room: closer than an hour
        (1000, 24, 3, [964, 976, 988]),
        (1000, 24, 0, []),
    ],
)
def test_origins_are_the_newest_and_complete(buckets: int, train: int, count_max: int, expected: list[int]) -> None:
    history = DemandSeries(start_s=600, bucket_s=300, values=np.ones(buckets))
    origins = origins_of(history, windows=12, train=train, count_max=count_max)
    assert origins == tuple(600 + 300.0 * place for place in expected)


def test_the_forecaster_is_told_nothing_after_the_origin() -> None:
    history = hourly(1, 2, 3, 4)
    ends = []

    def spy(past: DemandSeries, windows: int) -> FloatArray:
        ends.append(past.end_s)
        return np.ones(windows)

    backtest(history, "spy", spy, origins=(3600, 7200), windows=12, quantile=0.9)
    assert ends == [3600, 7200]


def test_hours_without_data_are_not_judged() -> None:
    history = hourly(5, float("nan"), 5, 5)
    score = backtest(history, "x", last_hour_max_path, origins=(3600, 7200, 10_800), windows=12, quantile=0.9)
    assert [each.origin_s for each in score.outcomes] == [7200, 10_800]
    nothing = backtest(hourly(5), "x", last_hour_max_path, origins=(), windows=12, quantile=0.9)
    assert (nothing.weighted_error, nothing.coverage, nothing.calibrated_coverage) == (None, None, None)
