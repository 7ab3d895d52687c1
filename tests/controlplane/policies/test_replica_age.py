"""The age of a copy is never told too low."""

import math

from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.replica_age import LogPosition, ReplicaAge

CLOCKS_APART_S = 10.0


def test_nothing_is_known_of_a_copy_that_nobody_has_seen() -> None:
    age = ReplicaAge()
    assert age.age_s(100.0) == math.inf
    age.note_primary(LogPosition(bytes=1, timeline="00000001"), 100.0)
    assert age.age_s(100.0) == math.inf


def test_an_idle_primary_is_no_lag() -> None:
    age = ReplicaAge()
    for now_s in (1000.0, 2000.0):
        age.note_primary(LogPosition(bytes=7, timeline="00000001"), now_s)
        age.note_replica(LogPosition(bytes=7, timeline="00000001", replayed_ago_s=now_s), now_s)
        assert age.age_s(now_s + 1) == 1.0


def test_a_copy_that_stopped_ages_though_it_answers() -> None:
    age = ReplicaAge()
    age.note_primary(LogPosition(bytes=7, timeline="00000001"), 10.0)
    age.note_replica(LogPosition(bytes=7, timeline="00000001"), 10.0)
    for second in range(11, 31):
        age.note_primary(LogPosition(bytes=7 + second, timeline="00000001"), float(second))
        age.note_replica(LogPosition(bytes=7, timeline="00000001"), float(second))
    assert age.age_s(30.0) == 20.0
    age.note_replica(LogPosition(bytes=7 + 25, timeline="00000001"), 31.0)
    assert age.age_s(31.0) == 6.0, "it is as new as the primary was at 25"


def test_without_a_primary_the_last_transaction_bounds_the_age() -> None:
    age = ReplicaAge()
    age.note_replica(LogPosition(bytes=7, timeline="00000001", replayed_ago_s=30.0), 100.0)
    assert age.age_s(110.0) == 40.0 + CLOCKS_APART_S
    age.note_replica(LogPosition(bytes=8, timeline="00000001", replayed_ago_s=-15.0), 120.0)
    assert age.age_s(120.0) == 0.0, "its clock is behind the primary's by more than is expected"


def test_a_standby_whose_clock_is_behind_is_not_as_new_as_it_believes() -> None:
    """Its clock is 5 s behind the primary's, and so is what it has replayed: to itself it looks entirely new."""
    age = ReplicaAge()
    for second in range(100, 110):
        age.note_primary(LogPosition(bytes=second, timeline="00000001"), float(second))
        age.note_replica(LogPosition(bytes=second - 5, timeline="00000001", replayed_ago_s=0.0), float(second))
    assert age.age_s(109.0) >= 5.0


def test_a_former_primary_is_not_as_new_as_the_one_after_it() -> None:
    age = ReplicaAge()
    age.note_primary(LogPosition(bytes=7, timeline="00000002"), 10.0)
    age.note_replica(LogPosition(bytes=9, timeline="00000001"), 10.0)
    assert age.age_s(10.0) == math.inf
    age.note_primary(LogPosition(bytes=8, timeline="00000002"), 11.0)
    age.note_replica(LogPosition(bytes=8, timeline="00000002"), 12.0)
    assert age.age_s(12.0) == 1.0, "it is the primary itself"


def test_a_standby_that_cannot_follow_the_new_primary_is_not_in_step_with_it() -> None:
    """It is further on in the log of the former one, and goes on to answer."""
    age = ReplicaAge()
    age.note_primary(LogPosition(bytes=100, timeline="00000001"), 0.0)
    age.note_replica(LogPosition(bytes=120, timeline="00000001"), 0.0)
    for second in range(1, 60):
        age.note_primary(LogPosition(bytes=90 + second // 4, timeline="00000002"), float(second))
        age.note_replica(LogPosition(bytes=120, timeline="00000001", replayed_ago_s=100.0 + second), float(second))
    assert age.age_s(60.0) == 60.0


def test_a_new_timeline_begins_before_what_the_former_primary_wrote_last() -> None:
    age = ReplicaAge()
    age.note_primary(LogPosition(bytes=150, timeline="00000001"), 0.0)
    age.note_primary(LogPosition(bytes=91, timeline="00000002"), 10.0)
    age.note_replica(LogPosition(bytes=91, timeline="00000001"), 11.0)
    assert age.age_s(12.0) == math.inf, "of the former timeline"
    age.note_replica(LogPosition(bytes=91, timeline="00000002"), 11.0)
    assert age.age_s(12.0) == 2.0, "what the former primary wrote after the new timeline's beginning is no measure"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=60))
def test_the_age_is_at_least_the_true_one(steps: list[tuple[int, int]]) -> None:
    """Each second the primary writes, and the copy replays some of what was written."""
    age, written, replayed, history = ReplicaAge(), 0, 0, []
    for second, (writes, replays) in enumerate(steps):
        written += writes
        history.append(written)
        replayed = min(written, replayed + replays)
        age.note_primary(LogPosition(bytes=written, timeline="00000001"), float(second))
        age.note_replica(LogPosition(bytes=replayed, timeline="00000001"), float(second))
        newest = max((at for at, then in enumerate(history) if then <= replayed), default=-math.inf)
        assert age.age_s(float(second)) == second - newest
