import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.arena import ALIGNMENT_BYTES, Run, lowest_gap
from dataplane.memory.residency import ResidencyFacts, ResidentModel, choose_evictions

A = ALIGNMENT_BYTES


def resident(model: str, first: int, size: int, used_s: float) -> ResidentModel:
    return ResidentModel(model=model, run=Run(offset_bytes=first * A, size_bytes=size * A), used_s=used_s)


# An arena of 10: a a a b b b b c c .
RESIDENTS = (resident("a", 0, 3, 5.0), resident("b", 3, 4, 9.0), resident("c", 7, 2, 1.0))


@pytest.mark.parametrize(
    ("needed", "running", "evicted"),
    [
        (1, None, ()),  # the end is free
        (2, None, ("c",)),  # c is the oldest, and its 2 + 1 suffice
        (3, None, ("c",)),
        (4, None, ("b",)),  # c and a (older) do not make one gap of 4; with b gone, neither had to leave
        (7, None, ("c", "b")),  # all three left, then a, used later than c, may stay
        (10, None, ("c", "a", "b")),
        (4, "b", None),  # b must stay: gaps of 3 and 3
        (3, "c", ("a",)),
        (11, None, None),
    ],
)
def test_least_recently_used_leave_until_it_fits(
    needed: int, running: str | None, evicted: tuple[str, ...] | None
) -> None:
    facts = ResidencyFacts(residents=RESIDENTS, capacity_bytes=10 * A, needed_bytes=needed * A, running=running)
    assert choose_evictions(facts) == evicted


@given(
    sizes=st.lists(st.integers(1, 4), max_size=6),
    used=st.lists(st.floats(0, 100), min_size=6, max_size=6),
    needed=st.integers(1, 24),
    running=st.integers(0, 6),
)
def test_the_answer_makes_room_and_nobody_leaves_for_nothing(
    sizes: list[int], used: list[float], needed: int, running: int
) -> None:
    residents = tuple(resident(str(i), sum(sizes[:i]), size, used[i]) for i, size in enumerate(sizes))
    facts = ResidencyFacts(residents=residents, capacity_bytes=24 * A, needed_bytes=needed * A, running=str(running))
    evicted = choose_evictions(facts)

    def fits(staying: set[str]) -> bool:
        return lowest_gap((r.run for r in residents if r.model in staying), 24 * A, needed * A) is not None

    everybody = {r.model for r in residents}
    if evicted is None:
        assert not fits(everybody & {str(running)})
        return
    assert str(running) not in evicted
    assert fits(everybody - set(evicted))
    assert not any(fits(everybody - set(evicted) | {spared}) for spared in evicted)
