"""What regions admitted together is compared with one bucket of the limit."""

from collections.abc import Iterable

from ops.faults.regional.limited import (
    BUDGETED,
    LIMITED,
    REQUESTS_PER_MINUTE,
    TOKENS_TOTAL,
    Admitted,
    Caller,
    excess_of,
    limit_findings,
)


def at(times_s: Iterable[float], tokens: int = 1) -> list[Admitted]:
    return [Admitted(started_s=time_s, ended_s=time_s, tokens=tokens) for time_s in times_s]


def caller(tenant: str, admitted: list[Admitted]) -> Caller:
    return Caller(tenant=tenant, region="north", url="http://127.0.0.1:1", key="k", model="m", admitted=admitted)


def test_a_full_bucket_and_what_flows_in_is_no_excess() -> None:
    assert excess_of(at([0.0] * 60 + [float(second) for second in range(1, 120)]), 60) == 0.0


def test_more_than_a_bucket_at_once_is_an_excess_wherever_it_lies() -> None:
    calm = [float(second) for second in range(0, 600, 10)]
    assert excess_of(at([*calm, *[700.0] * 63]), 60) == 3.0


def test_a_request_that_lasted_counts_when_it_excuses_most() -> None:
    """It may have been admitted at its end, when more had flowed in."""
    lasting = [Admitted(started_s=0.0, ended_s=3.0, tokens=1)] * 63
    assert excess_of(lasting, 60) == 0.0


def test_regions_are_counted_together() -> None:
    third = at([0.0] * (REQUESTS_PER_MINUTE // 3 + 1))
    assert limit_findings([caller(LIMITED, third)] * 2) == []
    assert limit_findings([caller(LIMITED, third)] * 3) == ["3.0 requests more than 60 a minute were admitted"]
    half = at([0.0], tokens=TOKENS_TOTAL // 2)
    assert limit_findings([caller(BUDGETED, half)] * 2) == []
    assert limit_findings([caller(BUDGETED, half)] * 3) == ["900 tokens were spent of a budget of 600"]
