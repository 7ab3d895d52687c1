import pytest

from ops.profiling.fragmentation import TABLE_1_SHAPES, simulate_fragmentation


@pytest.mark.parametrize("load", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_four_shapes_under_random_load_waste_less_than_a_fifth(seed: int, load: float) -> None:
    found = simulate_fragmentation(seed=seed, steps=1500, slabs=512, load=load)
    assert 0 < found.overall < 0.2
    assert found.peak < 0.2
    assert len(found.by_shape) == 4
    assert found.load > 0.6 * min(load, 1.0), "there was no load"


def test_the_measure_sees_slabs_that_are_too_small_for_a_shape() -> None:
    """Of 64 MiB one block of 40 MiB can be used, whatever the load."""
    found = simulate_fragmentation(seed=0, steps=200, slabs=512, slab_bytes=64 * 2**20)
    assert found.by_shape[max(TABLE_1_SHAPES)] == 0.375


def test_the_same_seed_gives_the_same_figures() -> None:
    one, two, other = (simulate_fragmentation(seed=seed, steps=100, slabs=256) for seed in (3, 3, 4))
    assert one == two != other
