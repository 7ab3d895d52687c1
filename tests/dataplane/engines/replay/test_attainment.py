"""20 models on one slot under Poisson load, by the replay engine with H800 step times: do users get what the slot's
load says they will? In simulated time; from light load to far too much.
"""

import json

import pytest
from typer.testing import CliRunner

from dataplane.scheduling.profile import load_gpu_profile
from ops.bench.planner.pool import PROFILE, PoolFigures, PoolLoad, app, measure_pool, over_requests

TOLERANCE = 0.05


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
    assert over_requests(figures, "kept") == pytest.approx(over_requests(figures, "predicted"), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("rate_per_s", [0.008, 0.016, 0.03, 0.045])
def test_attainment_is_what_the_load_predicts_at_length(rate_per_s: float, decode_only: bool) -> None:
    figures = measure(rate_per_s, seeds=range(1, 7), duration_s=100, decode_only=decode_only)
    assert over_requests(figures, "kept") == pytest.approx(over_requests(figures, "predicted"), abs=TOLERANCE)


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


def test_the_table_for_a_tighter_objective() -> None:
    arguments = ["--rate", "0.01", "--seeds", "1", "--duration-s", "20", "--json", "--tbt-s"]
    usual, tight = (CliRunner().invoke(app, [*arguments, tbt_s]) for tbt_s in ("0.1", "0.02"))
    assert usual.exit_code == tight.exit_code == 0, usual.output + tight.output
    for before, after in zip(json.loads(usual.stdout), json.loads(tight.stdout), strict=True):
        assert after["alpha"] > before["alpha"], "tokens are due more often"
        assert after["kept"] < before["kept"]
