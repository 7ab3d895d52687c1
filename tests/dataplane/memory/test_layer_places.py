"""Layers that take turns in the places that KV has left them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engines.core.remapping.circle import spaced
from dataplane.memory.layer_places import LayerPlaces, Load


def rotated(layers: int, given_up: int, frames: int) -> LayerPlaces:
    places = LayerPlaces(layers)
    places.rotate(spaced(layers, given_up + frames))
    places.lend(given_up)
    return places


def run_step(places: LayerPlaces, layers: int) -> list[Load]:
    """The loads of one step; every layer must be there when it runs."""
    loads = list(places.loads())
    for layer in range(layers):
        assert places.place_of(layer) is not None, f"layer {layer} is not there"
        after = places.load_after(layer)
        loads += [] if after is None else [after]
        places.check()
    return loads


def test_the_papers_example_layers_0_and_4_share_a_place() -> None:
    places = rotated(8, given_up=1, frames=1)
    assert places.lent == {4}
    assert run_step(places, 8) == [Load(layer=4, place=0, instead_of=0), Load(layer=0, place=0, instead_of=4)]
    assert not places.whole
    places.take_back(4)
    places.rotate(())
    assert places.loads() == (Load(layer=4, place=4, instead_of=None),)
    assert places.whole


@pytest.mark.parametrize(("given_up", "frames"), [(1, 1), (2, 1), (1, 2), (3, 2), (4, 3), (7, 1)])
def test_each_rotating_layer_comes_once_a_step_and_none_is_waited_for(given_up: int, frames: int) -> None:
    """Load number j takes the place of load j - frames, also where the frames do not divide the rotating layers."""
    layers = 8
    places = rotated(layers, given_up, frames)
    loads: list[Load] = []
    for _ in range(4):
        loads += run_step(places, layers)
    rotating = spaced(layers, given_up + frames)
    assert [load.layer for load in loads] == [rotating[(n + frames) % len(rotating)] for n in range(len(loads))]
    assert len(loads) == 4 * len(rotating)
    held = [*rotating[:frames], *(load.layer for load in loads)]
    assert [load.instead_of for load in loads] == held[: len(loads)]


def test_a_step_that_begins_anew_finds_its_layers() -> None:
    places = rotated(8, given_up=3, frames=1)
    places.load_after(0)
    assert places.place_of(2) is not None
    assert places.place_of(0) is None
    assert places.load_now(0).instead_of == 2
    places.check()


def test_the_last_place_of_the_rotating_layers_is_not_lent() -> None:
    places = LayerPlaces(4)
    places.rotate([0, 2])
    with pytest.raises(AssertionError, match="cannot be lent"):
        places.lend(2)


@given(st.data())
@settings(max_examples=150)
def test_whatever_is_lent_and_taken_back_every_layer_is_there_when_it_runs(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 9))
    places = LayerPlaces(layers)
    for _ in range(data.draw(st.integers(1, 5))):
        given_up = data.draw(st.integers(0, layers - 1))
        frames = data.draw(st.integers(1, layers - given_up)) if given_up else 0
        more = given_up - len(places.lent)
        for place in sorted(places.lent)[: max(-more, 0)]:
            places.take_back(place)
        places.rotate(spaced(layers, given_up + frames))
        if more > 0:
            places.lend(more)
        assert len(places.lent) == given_up
        if data.draw(st.booleans()):  # else it changes again before it runs
            for _ in range(2):
                run_step(places, layers)
            assert places.whole is (given_up == 0)
        places.check()
