"""Guessed times are compared with points of one card that is known."""

import pytest

from dataplane.scheduling.fit import DecodePoint, PrefillPoint
from ops.bench.engine.guessed_times import compared, kv_bytes_of
from ops.profiling.cards import CARDS
from ops.profiling.guess import guess_times
from ops.profiling.published_points import PointSet


def points(factor: float, *, model: str = "some_7b", gpu_type: str = "H800", gpus: int = 1) -> PointSet:
    """Points that take `factor` times as long as they are guessed to."""
    latency = guess_times(14 * 10**9, kv_bytes_of("some_7b", 14 * 10**9), CARDS["H800"], gpus=gpus).latency
    return PointSet(
        source="test",
        model=model,
        gpu_type=gpu_type,
        gpus=gpus,
        prefill=tuple(
            PrefillPoint(tokens=n, squared_tokens=n * n, seconds=factor * latency.prefill_s(n, n * n))
            for n in (64, 512, 4096)
        ),
        decode=tuple(
            DecodePoint(context_tokens=512 * n, batch=n, seconds=factor * latency.decode_s(512 * n, n))
            for n in (1, 8, 64)
        ),
        dropped=0,
    )


@pytest.mark.parametrize("gpus", [1, 4])
def test_what_takes_twice_as_long_is_guessed_at_half(gpus: int) -> None:
    row = compared(points(2.0, gpus=gpus, gpu_type="h800"))
    assert row is not None
    assert (round(row["prefill"], 9), round(row["decode"], 9), row["points"]) == (0.5, 0.5, 6)
    assert (row["gpus"], row["gpu_type"]) == (gpus, "H800")


def test_unknown_sizes_and_cards_are_left_out() -> None:
    for one in (points(1.0, model="opus"), points(1.0, gpu_type="odd")):
        assert compared(one) is None
