"""The approximate index of prefixes: what it finds, what it forgets, and its bounds."""

import pytest

from controlplane.policies.prefix_index import HOLDERS_MAX, PrefixIndex


def index_of(*notes: tuple[list[int], str, float], keys_max: int = 1000) -> PrefixIndex:
    index = PrefixIndex(keys_max)
    for keys, instance, now_s in notes:
        index.note(keys, instance, now_s, computed=True)
    return index


def test_it_finds_how_much_each_instance_has() -> None:
    index = index_of(([1, 2, 3], "a", 1.0), ([1, 2], "b", 2.0), ([9], "c", 3.0))
    assert index.find([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert index.find([1, 5]) == {"a": 1, "b": 1}
    assert index.find([5, 1]) == {}
    assert index.find([]) == {}


def test_a_piece_in_the_middle_alone_is_no_prefix() -> None:
    index = index_of(([1, 2, 3], "a", 1.0), ([2, 3], "b", 1.0))
    assert index.find([1, 2, 3]) == {"a": 3}


def test_what_is_evicted_takes_with_it_all_that_was_used_before() -> None:
    index = index_of(([1, 2], "a", 1.0), ([3], "a", 2.0), ([4], "a", 3.0), ([1], "b", 1.0))
    index.note_evicted("a", 2.0)
    assert index.find([1, 2]) == {"b": 1}
    assert index.find([3]) == {}
    assert index.find([4]) == {"a": 1}, "used later"
    index.note([1, 2], "a", 4.0, computed=True)
    assert index.find([1, 2]) == {"a": 2, "b": 1}, "computed again"
    index.note_evicted("a", 1.0)
    assert index.find([4]) == {"a": 1}, "older news change nothing"


@pytest.mark.parametrize(
    ("expected_tokens", "cached_tokens", "found"),
    [(100, 100, {"a": 1}), (100, 50, {"a": 1}), (100, 49, {}), (0, 0, {"a": 1})],
)
def test_an_answer_with_less_than_half_of_what_was_expected_says_that_the_prefix_is_evicted(
    expected_tokens: int, cached_tokens: int, found: dict[str, int]
) -> None:
    index = index_of(([1], "a", 1.0), ([2], "a", 2.0), ([3], "a", 3.0))
    before = index.last_use([2], "a", 1)
    index.note_answer("a", before, expected_tokens=expected_tokens, cached_tokens=cached_tokens)
    assert index.find([1]) == index.find([2]) == found
    assert index.find([3]) == {"a": 1}, "used later"


def test_an_answer_says_nothing_of_what_was_not_computed_or_not_known() -> None:
    index = index_of(([1], "a", 1.0))
    index.note([2], "a", 2.0, computed=False)
    for before in (index.last_use([2], "a", 1), None):
        index.note_answer("a", before, expected_tokens=100, cached_tokens=0)
    assert index.find([1]) == index.find([2]) == {"a": 1}


def test_what_failed_is_dropped_at_that_instance_alone() -> None:
    index = index_of(([1, 2], "a", 1.0), ([1, 2], "b", 1.0))
    index.drop([1, 2], "a")
    assert index.find([1, 2]) == {"b": 2}
    index.drop([1, 2], "b")
    assert len(index) == 0


def test_only_what_was_computed_counts_as_such() -> None:
    index = PrefixIndex(10)
    index.note([1], "a", 1.0, computed=False)
    use = index.last_use([1], "a", 1)
    assert use is not None
    assert not use.computed
    index.note([1], "a", 2.0, computed=True)
    index.note([1], "a", 3.0, computed=False)
    use = index.last_use([1], "a", 1)
    assert use is not None
    assert (use.used_s, use.computed) == (3.0, True)
    assert index.last_use([1], "a", 0) is None
    assert index.last_use([1], "b", 1) is None


def test_what_was_computed_and_evicted_since_is_no_longer_computed() -> None:
    index = index_of(([1], "a", 1.0))
    index.note_evicted("a", 2.0)
    index.note([1], "a", 3.0, computed=False)
    use = index.last_use([1], "a", 1)
    assert use is not None
    assert not use.computed
    index.drop([1], "a", keep_computed=True)
    assert index.find([1]) == {}


def test_it_is_bounded_and_drops_ends_before_beginnings() -> None:
    index = index_of(([1, 2, 3], "a", 1.0), ([7, 8], "b", 2.0), keys_max=4)
    assert len(index) == 4
    assert index.find([1, 2, 3]) == {"a": 2}
    assert index.find([7, 8]) == {"b": 2}
    many = index_of(*(([1], f"i{number}", float(number)) for number in range(HOLDERS_MAX + 3)))
    assert set(many.find([1])) == {f"i{number}" for number in range(3, HOLDERS_MAX + 3)}
