"""The rate of the last minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduling.recent_tokens import SPAN_S, RecentTokens


def test_what_came_a_minute_ago_counts_no_more() -> None:
    recent = RecentTokens()
    assert recent.per_s(0.0) == 0.0
    recent.add(600, 10.2)
    recent.add(600, 10.9)
    recent.add(60, 40.0)
    assert recent.per_s(40.0) == 1260 / SPAN_S
    assert recent.per_s(69.9) == 1260 / SPAN_S
    assert recent.per_s(70.0) == 60 / SPAN_S
    assert recent.per_s(1000.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 1000)), max_size=50))
def test_it_is_the_sum_of_the_last_whole_seconds(arrivals: list[tuple[float, int]]) -> None:
    recent, now_s, seen = RecentTokens(), 0.0, list[tuple[int, int]]()
    for gap_s, tokens in arrivals:
        now_s += gap_s
        recent.add(tokens, now_s)
        seen.append((int(now_s), tokens))
    expected = sum(tokens for second, tokens in seen if second > int(now_s) - SPAN_S)
    assert recent.per_s(now_s) == pytest.approx(expected / SPAN_S)
