"""Whether KV has the place of the next model: by the tokens of a second either way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.engines.core.remapping.places import BatchDemand, PlaceFacts, lends_place
from dataplane.scheduling.decode import DecodeSettings

SETTINGS = DecodeSettings(quota_min_s=0.05, quota_max_s=4.0)
BATCH = BatchDemand(sequences=20, kv_bytes=20, step_s=0.03, least_step_s=0.01, tbt_s=0.1)
"""20 tokens in 30 ms; half of them, with half of the KV, in 20 ms."""


def facts(batch: BatchDemand = BATCH, **changes: float | bool) -> PlaceFacts:
    given = {"kv_bytes": 10, "place_bytes": 30, "load_s": 0.1, "bytes_per_s": 1e9, "lent": False, **changes}
    return PlaceFacts(batches=(batch, batch), **given)


@pytest.mark.parametrize(("memory", "expected"), [(20, 20 / 0.03), (10, 10 / 0.02), (40, 20 / 0.03)])
def test_a_part_of_a_batch_makes_fewer_tokens_in_shorter_steps(memory: int, expected: float) -> None:
    assert BATCH.tokens_per_s(memory) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("load_s", "lent", "expected"),
    [
        # 667 tokens/s for 500: 1.33 times. Loads are exposed at a load of 0.6, so a slice lasts 1.5 of them: the part
        # of the time in which tokens are made is 1.5 / 2.5. At the least slice of 50 ms, a load of 1 ms costs 2 %.
        (0.1, False, False),
        (0.001, False, True),
        # 50 ms of 60 are 83 %, which makes 1.11 times as many tokens; of 62, 1.08 times.
        (0.010, False, True),
        (0.012, False, False),
        (0.012, True, True),
        (0.017, True, False),
    ],
)
def test_lending_begins_where_it_gains_a_tenth_and_ends_where_it_gains_nothing(
    load_s: float, *, lent: bool, expected: bool
) -> None:
    assert lends_place(facts(load_s=load_s, lent=lent), SETTINGS) is expected


def test_kv_that_fits_anyway_needs_no_place() -> None:
    assert not lends_place(facts(kv_bytes=40, load_s=0.001), SETTINGS)
    assert not lends_place(facts(place_bytes=0, load_s=0.001), SETTINGS), "there is none"
    alone = replace(facts(load_s=0.001), batches=(BATCH,))
    assert not lends_place(alone, SETTINGS), "no other model decodes"


def test_forced_lending_asks_only_whether_kv_is_short() -> None:
    assert lends_place(facts(load_s=9.0), SETTINGS, forced=True)
    assert not lends_place(facts(load_s=9.0, kv_bytes=40), SETTINGS, forced=True)
    assert not lends_place(facts(load_s=9.0, place_bytes=0), SETTINGS, forced=True)


def test_kv_transfers_that_lending_spares_count() -> None:
    """Both batches fit into KV memory one at a time, so that lending makes them no larger."""
    slow = facts(kv_bytes=20, load_s=0.001, bytes_per_s=100)
    assert lends_place(slow, SETTINGS), "0.2 s of KV transfers for each slice of 1.6 s"
    assert not lends_place(replace(slow, bytes_per_s=1e9), SETTINGS)


@given(
    kv_bytes=st.integers(1, 60),
    place_bytes=st.integers(1, 60),
    load_s=st.floats(0, 2),
    bytes_per_s=st.floats(1, 1e6),
)
def test_what_begins_does_not_end_at_once(kv_bytes: int, place_bytes: int, load_s: float, bytes_per_s: float) -> None:
    asked = facts(kv_bytes=kv_bytes, place_bytes=place_bytes, load_s=load_s, bytes_per_s=bytes_per_s)
    if lends_place(asked, SETTINGS):
        assert lends_place(replace(asked, lent=True), SETTINGS)
