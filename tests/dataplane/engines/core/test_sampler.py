import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engines.core.sampler import Draw, _cut_tail, _keys, _largest, _noise, choose_tokens


def draw(position: int = 0, *, temperature: float = 1.0, top_p: float = 1.0, banned: tuple[int, ...] = ()) -> Draw:
    return Draw(temperature=temperature, top_p=top_p, seed=5, position=position, banned=banned)


def frequencies(probabilities: list[float], *, temperature: float = 1.0, top_p: float = 1.0) -> Counter[int | None]:
    logits = torch.tensor(probabilities).log().repeat(4000, 1)
    draws = [draw(position, temperature=temperature, top_p=top_p) for position in range(4000)]
    return Counter(choose_tokens(logits, draws))


def test_temperature_zero_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, -1.0, 2.0]])
    assert choose_tokens(logits, [draw(temperature=0.0)] * 2) == [1, 0]


@given(st.lists(st.sampled_from([float("-inf"), 0.0, 1.0, float("inf"), float("nan")]), min_size=1, max_size=40))
def test_the_largest_is_the_one_that_torch_takes(row: list[float]) -> None:
    """The first of several, and NaN before all others."""
    numbers = torch.tensor([row, row[::-1]])
    values, places = _largest(numbers)
    expected = numbers.max(dim=-1)
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(values, expected.values, equal_nan=True)


def test_frequencies_follow_the_probabilities() -> None:
    seen = frequencies([0.5, 0.3, 0.15, 0.05])
    for token, probability in enumerate([0.5, 0.3, 0.15, 0.05]):
        deviation = math.sqrt(probability * (1 - probability) * 4000)
        assert abs(seen[token] - probability * 4000) < 5 * deviation


@pytest.mark.parametrize(
    ("temperature", "expected"),  # p ** (1 / temperature), normalised: 0.8 / 0.2 -> 16 : 1, and 2 : 1
    [(0.5, 16 / 17), (2.0, 2 / 3)],
)
def test_temperature_sharpens_and_flattens(temperature: float, expected: float) -> None:
    seen = frequencies([0.8, 0.2], temperature=temperature)
    assert seen[0] / 4000 == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, {0, 1, 2, 3}), (0.96, {0, 1, 2, 3}), (0.9, {0, 1, 2}), (0.7, {0, 1}), (0.45, {1}), (0.0, {1})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(frequencies([0.3, 0.5, 0.15, 0.05], top_p=top_p)) == kept


def test_banned_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(300, 1)
    draws = [draw(p, temperature=p % 2, banned=(1,)) for p in range(300)]
    assert set(choose_tokens(logits, draws)) == {0, 2}


def test_a_row_that_is_not_a_number_spoils_only_itself() -> None:
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [2.0, 1.0]])
    for temperature in (0.0, 1.0):
        first, broken, last = choose_tokens(logits, [draw(temperature=temperature)] * 3)
        assert broken is None
        assert {first, last} <= {0, 1}


@settings(max_examples=50)
@given(
    temperature=st.floats(1e-6, 100),
    top_p=st.floats(0.01, 1),
    row=st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3),
    others=st.lists(st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), max_size=4),
)
def test_what_is_drawn_does_not_depend_on_the_company(
    temperature: float, top_p: float, row: list[float], others: list[list[float]]
) -> None:
    mine = draw(3, temperature=temperature, top_p=top_p)
    alone = choose_tokens(torch.tensor([row]), [mine])
    together = choose_tokens(torch.tensor([*others, row]), [*(draw(at) for at in range(len(others))), mine])
    assert together[-1] == alone[0]


def test_noise_depends_on_seed_position_and_token_and_is_exponential() -> None:
    keys = _keys([(seed, position) for seed in range(40) for position in range(40)])
    values = _noise(torch.tensor(keys), 64)
    assert len(values.unique()) > 0.98 * values.numel()
    assert values.min() > 0
    assert values.mean() == pytest.approx(1.0, abs=0.02)
    assert values.exp().reciprocal().var() == pytest.approx(1 / 12, abs=0.002)
    assert torch.corrcoef(values).fill_diagonal_(0).abs().mean() < 0.13  # 64 numbers each: by chance 0.1


def test_the_rounding_of_another_batch_changes_no_token() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4000, 512) * 2
    draws = [draw(position) for position in range(4000)]
    assert choose_tokens(logits + torch.randn_like(logits) * 1e-6, draws) == choose_tokens(logits, draws)


def cut_frequencies(probabilities: list[float], **fields: float) -> set[int | None]:
    logits = torch.tensor(probabilities).log().repeat(2000, 1)
    draws = [Draw(**{"temperature": 1.0, "top_p": 1.0, "seed": 5, **fields}, position=at) for at in range(2000)]
    return set(choose_tokens(logits, draws))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, {1, 0}),
        ({"top_k": 1}, {1}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.25, "top_k": 2}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.5 is over 60 % of the 0.8 that two tokens have
        ({"min_p": 0.25, "top_p": 0.9}, {0, 1, 2}),
        ({"temperature": 0.25, "min_p": 0.2}, {1}),  # the temperature comes first
    ],
)
def test_top_k_and_min_p_keep_the_likeliest(fields: dict[str, float], kept: set[int]) -> None:
    assert cut_frequencies([0.3, 0.5, 0.15, 0.05], **fields) == kept


@settings(max_examples=100)
@given(
    logits=st.lists(st.floats(-30, 5, width=32), min_size=2, max_size=60),
    top_p=st.floats(0, 1, exclude_max=True, width=32),
)
def test_top_p_keeps_what_sorting_would(logits: list[float], top_p: float) -> None:
    """All of the smallest set, and beyond it only tokens that are as likely as its last one, to within 1 / 2048."""
    probabilities = torch.softmax(torch.tensor([logits]), dim=-1)
    kept = _cut_tail(probabilities.clone(), torch.tensor([[top_p]]))[0] > 0
    ordered = probabilities[0].double().sort(descending=True).values
    before = ordered.cumsum(0) - ordered
    least = ordered[before < top_p * ordered.sum() * (1 - 1e-5)][-1:].tolist() or ordered[:1].tolist()
    most = ordered[before < top_p * ordered.sum() * (1 + 1e-5) + 1e-38][-1:].tolist() or ordered[:1].tolist()
    assert probabilities[0][kept].min() >= most[0] * (1 - 1 / 2047)
    assert kept[probabilities[0] >= least[0]].all()


def test_rows_are_cut_each_by_its_own_top_p() -> None:
    """Of a vocabulary so flat that thousands of tokens are in the set, beside one that has few."""
    flat = torch.linspace(1, 2, 8000)
    peaked = torch.full((8000,), 1e-3)
    peaked[:3] = torch.tensor([5000.0, 3000.0, 1000.0])
    made = set()
    for position in range(600):
        draws = [draw(position, top_p=0.5), draw(position), draw(position, top_p=0.8)]
        token, free, few = choose_tokens(torch.stack((flat, flat, peaked)).log(), draws)
        assert few in {0, 1}
        assert token == free or free is None or flat[free] < flat[token or 0]
        made.add(token)
    inside = (flat.sort(descending=True).values.cumsum(0) < 0.5 * flat.sum()).sum().item()
    least = min(token for token in made if token is not None)
    assert 8000 - inside - 5 <= least <= 8000 - inside + 200


def test_the_smallest_temperatures_take_the_largest() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 - 1e-6]])
    for temperature in (1e-300, 1e-40, 1e-12):
        assert choose_tokens(logits.clone(), [draw(temperature=temperature)]) == [1]


def test_only_allowed_tokens_are_chosen_and_none_beyond_the_mask() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 20.0]]).repeat(200, 1)
    allowed = b"\xc8\0\xc8"
    draws = [
        Draw(temperature=p % 2, top_p=1.0, seed=5, position=p, allowed=allowed if p < 199 else None) for p in range(200)
    ]
    *masked, free = choose_tokens(logits, draws)
    assert set(masked) == {0, 2}
    assert free == 3


def test_a_row_without_an_allowed_token_has_none() -> None:
    nothing = Draw(temperature=0.0, top_p=1.0, seed=5, position=0, allowed=b"\0\0")
    assert choose_tokens(torch.zeros(2, 2), [nothing, draw(temperature=0.0)]) == [None, 0]
