"""20 models on one slot under Poisson load, by the replay engine with H800 step times: do users get what the slot's
load says they will? In simulated time; from light load to far too much.
"""

import pytest

from dataplane.profile import load_gpu_profile
from ops.bench.pool import PROFILE, PoolFigures, PoolLoad, measure_pool

TOLERANCE = 0.05


def pooled(figures: list[PoolFigures], name: str) -> float:
    """A mean over all requests of several runs."""
    return float(sum(getattr(one, name) * one.requests for one in figures) / sum(one.requests for one in figures))


def measure(
    rate_per_s: float, *, seeds: range, duration_s: float, decode_only: bool, prefetch: bool = True
) -> list[PoolFigures]:
    profile = load_gpu_profile(PROFILE)
    loads = (
        PoolLoad(rate_per_s=rate_per_s, seed=seed, duration_s=duration_s, decode_only=decode_only) for seed in seeds
    )
    return [measure_pool(load, profile=profile, prefetch=prefetch) for load in loads]


@pytest.mark.parametrize(
    ("rate_per_s", "decode_only"), [(0.008, True), (0.02, True), (0.045, True), (0.008, False), (0.03, False)]
)
def test_attainment_is_what_the_load_predicts(rate_per_s: float, decode_only: bool) -> None:
    figures = measure(rate_per_s, seeds=range(1, 3), duration_s=60, decode_only=decode_only)
    assert pooled(figures, "kept") == pytest.approx(pooled(figures, "predicted"), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("rate_per_s", [0.008, 0.016, 0.03, 0.045])
def test_attainment_is_what_the_load_predicts_at_length(rate_per_s: float, decode_only: bool) -> None:
    figures = measure(rate_per_s, seeds=range(1, 7), duration_s=100, decode_only=decode_only)
    assert pooled(figures, "kept") == pytest.approx(pooled(figures, "predicted"), abs=TOLERANCE)


def test_more_load_is_seen_and_prefetching_helps() -> None:
    light, heavy, unaided = (
        measure(rate_per_s, seeds=range(1, 2), duration_s=60, decode_only=True, prefetch=prefetch)[0]
        for rate_per_s, prefetch in ((0.005, True), (0.03, True), (0.03, False))
    )
    assert light.alpha < 0.5
    assert light.service > 0.95
    assert heavy.alpha > 2 * light.alpha
    assert heavy.service > unaided.service
    assert heavy.wait_s < unaided.wait_s


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (measure(0.01, seeds=range(7, 8), duration_s=30, decode_only=False)[0] for _ in range(2))
    assert first == second
