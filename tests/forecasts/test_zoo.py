"""The zoo's series: the same for the same seed, and with what their kind says."""

import numpy as np
import pytest

from forecasts.series import FloatArray
from forecasts.zoo import HELD_OUT_KINDS, KINDS, PER_DAY, hard_series

ALL = [*KINDS, *HELD_OUT_KINDS]


def halves(kind: str, seed: int) -> tuple[FloatArray, FloatArray]:
    values = hard_series(kind, seed).values
    return values[: len(values) // 2], values[len(values) // 2 :]


@pytest.mark.parametrize("kind", ALL)
def test_a_seed_gives_its_series_again_and_another_gives_another(kind: str) -> None:
    first, again, other = (hard_series(kind, seed, days=8).values for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert len(first) == 8 * PER_DAY
    assert not np.array_equal(first, other, equal_nan=True)
    assert np.nanmin(first) >= 0


def test_kinds_are_told_apart_and_unknown_ones_refused() -> None:
    assert not set(KINDS) & set(HELD_OUT_KINDS)
    with pytest.raises(ValueError, match="kind: 'calm' is none of steady, shift"):
        hard_series("calm", 1)
    with pytest.raises(ValueError, match="days must be at least 4, got 3"):
        hard_series("steady", 1, days=3)


@pytest.mark.parametrize("seed", range(4))
def test_what_happens_happens_in_the_second_half(seed: int) -> None:
    first, second = halves("launch", seed)
    assert not first[: int(0.9 * len(first))].any()
    assert second[-1] > 0
    first, second = halves("death", seed)
    assert first[: int(0.9 * len(first))].all()
    assert second[-1] == 0
    before, after = halves("shift", seed)
    ratio = after[-PER_DAY:].mean() / before[:PER_DAY].mean()
    assert not 0.5 < ratio < 2
    week = hard_series("fade", seed).values
    assert week[-PER_DAY:].mean() < 0.01 * week[: 2 * PER_DAY].mean()


@pytest.mark.parametrize("seed", range(4))
def test_on_and_off_are_both_there(seed: int) -> None:
    for kind in ("on and off", "office hours", "silent week", "sparse"):
        _, second = halves(kind, seed)
        assert 0.02 < (second == 0).mean() < 0.98, kind
    _, second = halves("switching", seed)
    assert second.min() < 1000
    assert second.max() > 50_000
    assert np.isnan(halves("missing days", seed)[1]).any()
    bursts = hard_series("daily burst", seed).values.reshape(-1, PER_DAY)
    assert (bursts.max(axis=1) > 5 * np.median(bursts, axis=1)).all()
