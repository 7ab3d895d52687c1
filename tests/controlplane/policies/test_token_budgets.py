"""Blocks of budgets: small enough that little is held where it is not used."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.token_budgets import Budget, Reserved, choose_block


def test_a_block_is_a_part_of_the_budget_and_of_what_is_left() -> None:
    day = {Budget.DAY: Reserved(tokens=100_000, reserved=0)}
    assert choose_block(day, 10).tokens == 1000
    assert choose_block(day, 5000).tokens == 5000
    assert choose_block({Budget.DAY: Reserved(tokens=100_000, reserved=99_000)}, 10).tokens == 100
    both = {**day, Budget.TOTAL: Reserved(tokens=500, reserved=200)}
    assert choose_block(both, 300).tokens == 300
    assert choose_block(both, 301).refused == Budget.TOTAL


@given(
    st.dictionaries(st.sampled_from(Budget), st.tuples(st.integers(1, 10**9), st.floats(0, 1.2)), min_size=1),
    st.integers(1, 10**6),
)
def test_no_more_is_reserved_than_is_left_of_every_budget(budgets: dict[Budget, tuple[int, float]], need: int) -> None:
    reserved = {name: Reserved(tokens=most, reserved=int(most * part)) for name, (most, part) in budgets.items()}
    choice = choose_block(reserved, need)
    left = min(budget.left for budget in reserved.values())
    assert (choice.refused is None) == (need <= left)
    assert choice.tokens <= max(0, left)
    assert choice.tokens >= (need if choice.refused is None else 0)
