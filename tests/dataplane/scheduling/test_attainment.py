"""Attainment by hand, and Theorem 3.1 against arrivals."""

import math

import numpy as np
import pytest

from dataplane.scheduling.attainment import ServedRequest, expected_active_models, service_attainment, token_attainment


def served(*token_times_s: float, tokens: int | None = None) -> ServedRequest:
    """One that arrived at 10, its first token due at 11 and one every 0.5 s after it."""
    return ServedRequest(
        arrived_s=10.0,
        token_times_s=token_times_s,
        tokens=len(token_times_s) if tokens is None else tokens,
        ttft_s=1.0,
        tbt_s=0.5,
    )


@pytest.mark.parametrize(
    ("request_", "token", "service"),
    [
        (served(11.0, 11.5, 12.0), 1.0, 1.0),  # each just in time
        (served(10.2, 10.3, 12.0), 1.0, 1.0),  # tokens made ahead are buffered
        (served(10.5, 12.0, 12.1), 1 / 3, 1 - 0.5 / 2.1),  # due at 11.5, then 12.5 and not 12.0: 0.5 s overdue
        (served(12.0, 12.5, 13.0), 0.0, 1 - 1.0 / 3.0),  # 1 s late once; the rest restarts from there
        (served(14.0), 0.0, 1 - 3.0 / 4.0),
        (served(10.5, 11.0, tokens=3), 0.0, 0.0),  # failed: all missed
        (served(tokens=3), 0.0, 0.0),
        (served(), 1.0, 1.0),  # nothing was to be made
    ],
)
def test_attainment_of_one(request_: ServedRequest, token: float, service: float) -> None:
    assert token_attainment([request_]) == pytest.approx(token)
    assert service_attainment([request_]) == pytest.approx(service)


def test_tokens_are_weighed_alike_and_requests_too() -> None:
    good, failed = served(10.5), served(tokens=3)
    assert token_attainment([good, failed]) == pytest.approx(1 / 4)
    assert service_attainment([good, failed]) == pytest.approx(1 / 2)


def test_nothing_asked_is_all_kept() -> None:
    assert token_attainment([]) == service_attainment([]) == 1.0


def test_theorem_3_1_with_the_printed_inputs() -> None:
    assert expected_active_models(100, 0.037, 16.79) == pytest.approx(46.3, abs=0.05)


@pytest.mark.parametrize("spread", ["constant", "exponential"])
def test_theorem_3_1_against_arrivals(spread: str) -> None:
    """Each model an M/G/infinity queue, looked at every 50 s; only the mean service time matters."""
    rng = np.random.default_rng(31)
    models, rate_per_s, service_s, until_s = 100, 0.037, 16.79, 20_000.0
    looks_s = np.arange(200.0, until_s, 50.0)
    active = np.zeros(len(looks_s))
    for _ in range(models):
        arrived_s = np.sort(rng.uniform(0.0, until_s, rng.poisson(rate_per_s * until_s)))
        lasts_s = np.full(len(arrived_s), service_s)
        if spread == "exponential":
            lasts_s = rng.exponential(service_s, len(arrived_s))
        busy_until_s = np.maximum.accumulate(arrived_s + lasts_s)
        arrived = np.searchsorted(arrived_s, looks_s, side="right")
        active += (arrived > 0) & (busy_until_s[np.maximum(arrived - 1, 0)] > looks_s)
    expected = expected_active_models(models, rate_per_s, service_s)
    error = math.sqrt(expected * (1 - expected / models) / len(looks_s))  # of the mean, looks being independent
    assert abs(active.mean() - expected) < 4 * error
