"""Token buckets and requests at once, as every gateway and Redis count them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.limits import (
    Bucket,
    Limit,
    TenantLimits,
    Usage,
    choose_admission,
    retry_after_s,
    until_full_s,
)

LIMITS = TenantLimits(requests_per_minute=2, tokens_per_minute=600, concurrent_max=3)


def test_each_limit_refuses_by_itself_and_charges_nothing() -> None:
    first = choose_admission(Usage(), 300, LIMITS, 0.0)
    assert first.refused is None
    assert first.usage.requests == Bucket(level=1, at_s=0)
    assert first.usage.tokens == Bucket(level=300, at_s=0)
    tokens = choose_admission(first.usage, 301, LIMITS, 0.0)
    assert (tokens.refused, tokens.usage) == (Limit.TOKENS, first.usage)
    running = choose_admission(replace(first.usage, running=3), 1, LIMITS, 0.0)
    assert (running.refused, running.usage.requests) == (Limit.RUNNING, first.usage.requests)
    second = choose_admission(first.usage, 1, LIMITS, 0.0)
    third = choose_admission(second.usage, 1, LIMITS, 0.0)
    assert (second.refused, third.refused) == (None, Limit.REQUESTS)


def test_a_refused_request_is_let_in_at_the_time_it_was_told() -> None:
    usage = Usage(requests=Bucket(level=0.25, at_s=0), tokens=Bucket(level=10, at_s=0))
    for tokens, refused in ((1, Limit.REQUESTS), (400, Limit.REQUESTS)):
        assert choose_admission(usage, tokens, LIMITS, 0.0).refused == refused
    wait_s = retry_after_s(Limit.REQUESTS, usage, 1, LIMITS)
    assert wait_s == pytest.approx(22.5)
    assert choose_admission(usage, 1, LIMITS, wait_s - 0.01).refused == Limit.REQUESTS
    assert choose_admission(usage, 1, LIMITS, wait_s).refused is None
    rich = replace(usage, requests=Bucket(level=2, at_s=0))
    wait_s = retry_after_s(Limit.TOKENS, rich, 400, LIMITS)
    assert wait_s == pytest.approx(39)
    assert choose_admission(rich, 400, LIMITS, wait_s + 1e-6).refused is None
    assert retry_after_s(Limit.RUNNING, rich, 1, LIMITS) == 1.0


def test_a_bucket_fills_within_a_minute_and_pays_debts_first() -> None:
    bucket = Bucket(level=-600, at_s=100)
    assert bucket.refilled(600, 160).level == pytest.approx(0)
    assert bucket.refilled(600, 1e6).level == 600
    assert bucket.refilled(600, 90).level == -600, "a clock that went back gives nothing"
    assert until_full_s(bucket, 600) == pytest.approx(120)
    assert bucket.add(5000, 600).level == 600


def test_no_limit_counts_nothing() -> None:
    free = TenantLimits(queued_batch_tokens_max=1)
    assert not free.meter_interactive()
    assert choose_admission(Usage(running=10**6), 10**9, free, 0.0).usage.tokens is None
    assert TenantLimits(concurrent_max=1).meter_interactive()


def test_a_gateway_alone_takes_its_share() -> None:
    assert LIMITS.share(2) == TenantLimits(requests_per_minute=1, tokens_per_minute=300, concurrent_max=1)
    assert LIMITS.share(1000) == TenantLimits(requests_per_minute=1, tokens_per_minute=1, concurrent_max=1)
    assert TenantLimits().share(3) == TenantLimits()


@given(
    limit=st.integers(1, 100),
    asks=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60),
)
def test_no_more_is_let_in_than_a_full_bucket_and_what_refilled(limit: int, asks: list[tuple[float, int]]) -> None:
    limits, usage, now_s, taken = TenantLimits(tokens_per_minute=limit), Usage(), 0.0, 0
    for gap_s, tokens in asks:
        now_s += gap_s
        admission = choose_admission(usage, tokens, limits, now_s)
        usage = admission.usage
        taken += tokens if admission.refused is None else 0
        assert usage.tokens is not None
        assert -1e-9 <= usage.tokens.level <= limit
    assert taken <= limit * (1 + now_s / 60) + 1e-6
