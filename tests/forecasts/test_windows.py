import numpy as np
import pytest

from forecasts.series import FloatArray
from forecasts.windows import days_before, forward_filled, known_mean, next_max, trailing_max, trailing_mean

NAN = np.nan
VALUES = np.array([1.0, NAN, 5.0, 3.0])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (trailing_mean(VALUES, 2), [NAN, 1, 1, 5, 4]),
        (trailing_max(VALUES, 3), [NAN, 1, 1, 5, 5]),
        (next_max(VALUES, 2), [1, 5, 5, NAN, NAN]),  # the last two origins have no two buckets after them
        (next_max(VALUES, 5), [NAN] * 5),
        (next_max(np.array([NAN, NAN]), 1), [NAN] * 3),
        (forward_filled(np.array([NAN, 2, NAN, NAN, NAN, 7]), 2), [NAN, 2, 2, 2, NAN, 7]),
        (known_mean(np.array([[1.0, NAN, NAN], [3.0, 4.0, NAN]])), [2, 4, NAN]),
    ],
)
def test_statistics_of_every_origin(found: FloatArray, expected: list[float]) -> None:
    np.testing.assert_array_equal(found, expected)


def test_days_before_hold_the_same_time_of_past_days() -> None:
    table = days_before(np.arange(5.0), per_day=2, days=3)
    np.testing.assert_array_equal(table, [[NAN, NAN, 0, 1, 2], [NAN, NAN, NAN, NAN, 0], [NAN] * 5])
