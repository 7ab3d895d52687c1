"""Percentiles are values that came, by nearest rank."""

import pytest

from ops.faults.percentiles import percentile


@pytest.mark.parametrize(
    ("count", "share", "rank"),
    [(1, 0.5, 1), (1, 0.99, 1), (3, 0.5, 2), (4, 0.5, 2), (3, 0.99, 3), (100, 0.99, 99), (200, 0.99, 198), (9, 1.0, 9)],
)
def test_the_nearest_rank(count: int, share: float, rank: int) -> None:
    assert percentile([float(value) for value in range(count, 0, -1)], share) == rank


def test_what_never_came_counts() -> None:
    answers = [1.0, 2.0, 3.0, float("inf")]
    assert [percentile(answers, share) for share in (0.5, 0.95)] == [2.0, float("inf")]


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
