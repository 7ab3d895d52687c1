"""When KV comes in at the cost of models that wait, and how long slices are for it."""

import pytest

from dataplane.scheduling.swaps import SLICE_SWAPS, pays_off, slice_load_s


@pytest.mark.parametrize(("left_s", "expected"), [(0.3, True), (0.2, True), (0.19, False), (float("-inf"), False)])
def test_kv_comes_in_only_within_the_slice(left_s: float, *, expected: bool) -> None:
    assert pays_off(0.2, left_s) is expected


def test_a_slice_is_as_long_as_its_load_and_four_times_its_kv_transfers() -> None:
    assert slice_load_s(0.5, 0.0) == 0.5
    assert slice_load_s(0.5, 0.1) == pytest.approx(0.9)
    assert 0.1 / slice_load_s(0.0, 0.1) == pytest.approx(1 / SLICE_SWAPS)
