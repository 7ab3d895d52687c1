import numpy as np
import pytest

from forecasts.selection.calibration import adapted_level, log_ratio_quantiles
from forecasts.selection.past import weighted_quantile


@pytest.mark.parametrize(("quantile", "expected"), [(0.5, 2.0), (0.51, 3.0), (0.9, 3.0), (0.1, 1.0), (1.0, 4.0)])
def test_a_weighted_quantile_is_where_the_weight_lies(quantile: float, expected: float) -> None:
    values, weights = np.array([3.0, 1.0, 2.0, 4.0]), np.array([4.0, 1.0, 4.0, 1.0])
    assert weighted_quantile(values, weights, quantile) == expected


def test_ratios_of_forecasts_of_like_size_count() -> None:
    """Forecasts of 10 were missed by half, those of 1,000 by nothing."""
    ratios, forecasts = np.tile([0.5, 0.0], 50), np.tile(np.log([10.0, 1000.0]), 50)
    assert log_ratio_quantiles(ratios, forecasts, np.log(10.0), [0.9]) == 0.5
    assert log_ratio_quantiles(ratios, forecasts, np.log(1000.0), [0.9]) == 0.0
    assert log_ratio_quantiles(ratios, forecasts, np.log(1e9), [0.9]) == 0.0  # nothing is near: the nearest counts


def test_recent_ratios_count_more() -> None:
    ratios = np.r_[np.full(400, 1.0), np.zeros(400)]
    assert log_ratio_quantiles(ratios, np.zeros(800), 0.0, [0.7]) == 0.0  # by number half were 1


def test_a_few_ratios_give_their_largest() -> None:
    assert log_ratio_quantiles(np.array([0.1, 0.4, 0.2]), np.zeros(3), 0.0, [0.5, 0.9]).tolist() == [0.2, 0.4]


def test_the_level_settles_where_the_asked_share_is_covered() -> None:
    """Whatever was read from the past, covered one time in two at first: the level rises, and stays in bounds."""
    level = 0.9
    for index in range(100):
        level = adapted_level(level, 0.9, covered=index % 2 == 0)
    assert level == pytest.approx(0.995)
    assert adapted_level(0.996, 0.99, covered=False) == pytest.approx(0.9995)
    assert adapted_level(0.9, 0.9, covered=True) == pytest.approx(0.89)
    assert adapted_level(0.9, 0.9, covered=False) == pytest.approx(0.99)
