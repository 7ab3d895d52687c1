"""Shares of an alias's models, and what a change of weights moves."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.aliases import choose_model, main_model

WEIGHTS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 1000), min_size=1).filter(
    lambda weights: any(weights.values())
)
KEYS = [str(number).encode() for number in range(4000)]


@pytest.mark.parametrize("weights", [{"a": 95, "b": 5}, {"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 999}])
def test_each_model_gets_its_share(weights: dict[str, int]) -> None:
    got = Counter(choose_model(weights, key) for key in KEYS)
    whole = sum(weights.values())
    for model, weight in weights.items():
        expected = len(KEYS) * weight / whole
        assert abs(got[model] - expected) <= 4 * expected**0.5 + 1


@given(WEIGHTS, st.binary(max_size=20))
def test_a_key_keeps_its_model_and_never_gets_one_without_weight(weights: dict[str, int], key: bytes) -> None:
    chosen = choose_model(weights, key)
    assert weights[chosen] > 0
    assert choose_model(dict(reversed(weights.items())), key) == chosen


@given(WEIGHTS, st.sampled_from(["a", "b", "c", "d"]), st.integers(1, 1000), st.binary(max_size=20))
def test_a_weight_that_rises_takes_keys_and_moves_no_other(
    weights: dict[str, int], model: str, more: int, key: bytes
) -> None:
    before = choose_model(weights, key)
    after = choose_model(weights | {model: weights.get(model, 0) + more}, key)
    assert after in {before, model}


def test_absent_models_get_requests_only_where_all_are_absent() -> None:
    weights = {"a": 1, "b": 1}
    assert {choose_model(weights, key, absent=["b"]) for key in KEYS[:50]} == {"a"}
    assert {choose_model(weights, key, absent=["a", "b"]) for key in KEYS[:50]} == {"a", "b"}
    assert {choose_model({"a": 1, "b": 0}, key, absent=["a"]) for key in KEYS[:50]} == {"a"}, "b has no weight"


def test_an_alias_needs_a_weight() -> None:
    with pytest.raises(ValueError, match="above zero"):
        choose_model({"a": 0}, b"")


def test_deferred_requests_get_the_model_with_the_largest_weight() -> None:
    assert main_model({"new": 5, "old": 95}) == "old"
    assert main_model({"b": 1, "a": 1}) == "a"
