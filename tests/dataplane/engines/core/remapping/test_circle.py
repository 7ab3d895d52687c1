"""Even spacing and its two conditions, against every choice of layers in a schedule counted tick by tick."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dataplane.engines.core.remapping.circle import (
    FRAMES_MAX,
    Circle,
    Rotation,
    choose_rotation,
    deepest,
    is_hidden,
    least_waiting,
    spaced,
    step_s,
)


def circle(layers: int, load_s: float, compute_s: float = 1.0) -> Circle:
    return Circle(layers=layers, load_s=load_s, compute_s=compute_s)


def ticks_per_round(layers: int, rotating: tuple[int, ...], frames: int, load: int, compute: int) -> float:
    """The length of a round in the long run, by frames and link simulated tick by tick. Times are whole ticks."""
    held = set(rotating[:frames])
    spent: set[int] = set()  # held, but has run: its frame can be had
    wanted = [rotating[(frames + i) % len(rotating)] for i in range(len(rotating))]
    position = loads = 0
    computing = loading = 0
    ends = []
    tick = 0
    while len(ends) < 25:
        if loading == 0 and spent and (layer := wanted[loads % len(rotating)]) not in held:
            held.discard(min(spent, key=lambda other: (rotating.index(other) - rotating.index(layer)) % len(rotating)))
            spent &= held
            loading, coming = load, layer
        if computing == 0 and (position not in rotating or position in held - spent):
            computing = compute
        tick += 1
        if loading:
            loading -= 1
            if not loading:
                held.add(coming)
                loads += 1
        if computing:
            computing -= 1
            if not computing:
                if position in rotating:
                    spent.add(position)
                position = (position + 1) % layers
                if not position:
                    ends.append(tick)
    return (ends[-1] - ends[-13]) / 12


@pytest.mark.parametrize(
    ("layers", "load_s", "offloaded", "expected"),
    [
        (8, 3.0, 1, (0, 4)),  # the paper's example, from 0: while 1 2 3 run, layer 4 is loaded
        (8, 3.1, 1, None),  # 2 T_T <= 8 - 2 does not hold; two frames would need 3 x 3.1 <= 8
        (40, 3.0, 9, tuple(range(0, 40, 4))),  # 10 x 3 <= 30: m = alpha + 1
        (40, 3.0, 10, tuple(i * 40 // 12 for i in range(12))),  # 11 x 3 > 29, but 12 x 3 <= 40: m = alpha + 2
        (40, 3.0, 12, None),  # 14 x 3 > 40
        (40, 3.6, 7, tuple(range(0, 40, 5))),  # 8 x 3.6 <= 32; nine layers would do as well, but load more
    ],
)
def test_the_fewest_layers_that_hide_their_loads(
    layers: int, load_s: float, offloaded: int, expected: tuple[int, ...] | None
) -> None:
    found = choose_rotation(circle(layers, load_s), offloaded)
    assert (found and found.rotating) == expected


def test_a_gap_that_is_shorter_than_the_mean_is_reckoned_with() -> None:
    """Inequality 4 lets 7 of 40 layers take turns up to T_T = 4.71 T_c; the shortest gap of 5 holds 4 T_c."""
    six = Rotation(layers=40, offloaded=6, frames=1)
    assert 7 * 4.5 <= 40 - 7
    assert is_hidden(circle(40, 4.0), six)
    assert not is_hidden(circle(40, 4.5), six)
    assert step_s(circle(40, 4.5), six) == pytest.approx(40 + 2 * 0.5)  # two of its seven gaps are short


def test_three_frames_hide_what_two_do_not() -> None:
    assert choose_rotation(circle(7, 1.05), 3, frames_max=2) is None
    found = choose_rotation(circle(7, 1.05), 3)
    assert found is not None
    assert found.frames == 3
    assert step_s(circle(7, 1.05), found) == pytest.approx(7.0)


@pytest.mark.parametrize("layers", range(2, 7))
def test_no_choice_of_layers_hides_what_even_spacing_does_not(layers: int) -> None:
    for load in range(1, 2 * layers):
        for offloaded in range(1, layers):
            for frames in range(1, min(FRAMES_MAX, layers - offloaded) + 1):
                rotation = Rotation(layers=layers, offloaded=offloaded, frames=frames)
                even = is_hidden(circle(layers, load, 2), rotation)
                count = rotation.rotating_layers
                some = any(
                    ticks_per_round(layers, (0, *others), frames, load, 2) == 2 * layers
                    for others in combinations(range(1, layers), count - 1)
                )
                assert even == some, (load, rotation)


@examples(max_examples=50)
@given(layers=st.integers(2, 12), load=st.integers(1, 30), data=st.data())
def test_the_step_is_what_the_schedule_takes(layers: int, load: int, data: st.DataObject) -> None:
    offloaded = data.draw(st.integers(1, layers - 1))
    frames = data.draw(st.integers(1, min(FRAMES_MAX, layers - offloaded)))
    rotation = Rotation(layers=layers, offloaded=offloaded, frames=frames)
    ticks = ticks_per_round(layers, rotation.rotating, frames, load, 3)
    assert step_s(circle(layers, load, 3), rotation) == pytest.approx(ticks)


@examples(max_examples=50)
@given(layers=st.integers(2, 80), load_s=st.floats(0.01, 60.0), frames_max=st.integers(1, FRAMES_MAX))
def test_what_is_hidden_costs_nothing_and_less_is_hidden_too(layers: int, load_s: float, frames_max: int) -> None:
    model = circle(layers, load_s)
    most = deepest(model, frames_max=frames_max)
    assert 0 <= most < layers
    for offloaded in range(1, layers):
        found = choose_rotation(model, offloaded, frames_max=frames_max)
        assert (found is not None) == (offloaded <= most)
        if found:
            assert found.offloaded == offloaded
            assert step_s(model, found) == pytest.approx(layers)
            fewer = found.frames - 1
            assert not fewer or not is_hidden(model, Rotation(layers=layers, offloaded=offloaded, frames=fewer))


@examples(max_examples=50)
@given(layers=st.integers(2, 30), load_s=st.floats(0.1, 40.0), data=st.data())
def test_where_nothing_is_hidden_the_least_waiting_is_taken(layers: int, load_s: float, data: st.DataObject) -> None:
    offloaded = data.draw(st.integers(1, layers - 1))
    model = circle(layers, load_s)
    taken = step_s(model, least_waiting(model, offloaded))
    for frames in range(1, min(FRAMES_MAX, layers - offloaded) + 1):
        assert taken <= step_s(model, Rotation(layers=layers, offloaded=offloaded, frames=frames)) + 1e-9


@examples(max_examples=50)
@given(layers=st.integers(1, 200), data=st.data())
def test_spacing_is_even(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, layers))
    chosen = spaced(layers, count)
    gaps = {(after - before) % layers or layers for before, after in zip(chosen, (*chosen[1:], chosen[0]), strict=True)}
    assert len(set(chosen)) == count
    assert max(gaps) - min(gaps) <= 1
