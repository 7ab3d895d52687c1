"""Layers that rotate through the locations that KV does not use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engines.core.remapping.circle import spaced
from dataplane.memory.layer_locations import LayerLocations, Load


def rotated(layers: int, lent: int, frames: int) -> LayerLocations:
    locations = LayerLocations(layers)
    locations.rotate(spaced(layers, lent + frames))
    locations.lend(lent)
    return locations


def run_step(locations: LayerLocations, layers: int) -> list[Load]:
    """The loads of one step; every layer must have a location when it runs."""
    loads = list(locations.loads())
    for layer in range(layers):
        assert locations.location_of(layer) is not None, f"layer {layer} has no location"
        after = locations.load_after(layer)
        loads += [] if after is None else [after]
        locations.check()
    return loads


def test_the_papers_example_layers_0_and_4_share_a_place() -> None:
    locations = rotated(8, lent=1, frames=1)
    assert locations.lent == {4}
    assert run_step(locations, 8) == [Load(layer=4, location=0, replaces=0), Load(layer=0, location=0, replaces=4)]
    assert not locations.whole
    locations.reclaim(4)
    locations.rotate(())
    assert locations.loads() == (Load(layer=4, location=4, replaces=None),)
    assert locations.whole


@pytest.mark.parametrize(("lent", "frames"), [(1, 1), (2, 1), (1, 2), (3, 2), (4, 3), (7, 1)])
def test_each_rotating_layer_is_loaded_once_a_step_before_it_runs(lent: int, frames: int) -> None:
    """Load number j takes the location of load j - frames, also where the frames do not divide the rotating layers."""
    layers = 8
    locations = rotated(layers, lent, frames)
    loads: list[Load] = []
    for _ in range(4):
        loads += run_step(locations, layers)
    rotating = spaced(layers, lent + frames)
    assert [load.layer for load in loads] == [rotating[(n + frames) % len(rotating)] for n in range(len(loads))]
    assert len(loads) == 4 * len(rotating)
    held = [*rotating[:frames], *(load.layer for load in loads)]
    assert [load.replaces for load in loads] == held[: len(loads)]


def test_a_repeated_step_finds_its_layers() -> None:
    locations = rotated(8, lent=3, frames=1)
    locations.load_after(0)
    assert locations.location_of(2) is not None
    assert locations.location_of(0) is None
    assert locations.load_now(0).replaces == 2
    locations.check()


def test_the_last_place_of_the_rotating_layers_is_not_lent() -> None:
    locations = LayerLocations(4)
    locations.rotate([0, 2])
    with pytest.raises(AssertionError, match="cannot be lent"):
        locations.lend(2)


@given(st.data())
@settings(max_examples=150)
def test_every_layer_has_a_location_when_it_runs_whatever_is_lent(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 9))
    locations = LayerLocations(layers)
    for _ in range(data.draw(st.integers(1, 5))):
        lent = data.draw(st.integers(0, layers - 1))
        frames = data.draw(st.integers(1, layers - lent)) if lent else 0
        more = lent - len(locations.lent)
        for location in sorted(locations.lent)[: max(-more, 0)]:
            locations.reclaim(location)
        locations.rotate(spaced(layers, lent + frames))
        if more > 0:
            locations.lend(more)
        assert len(locations.lent) == lent
        if data.draw(st.booleans()):  # else it changes again before it runs
            for _ in range(2):
                run_step(locations, layers)
            assert locations.whole is (lent == 0)
        locations.check()
