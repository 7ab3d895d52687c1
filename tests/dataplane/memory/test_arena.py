import itertools

from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.arena import ALIGNMENT_BYTES, Arena, Run, lowest_gap

A = ALIGNMENT_BYTES


def test_models_lie_one_after_another() -> None:
    arena = Arena(10 * A)
    assert arena.allocate("a", 3 * A) == Run(offset_bytes=0, size_bytes=3 * A)
    assert arena.allocate("b", 1) == Run(offset_bytes=3 * A, size_bytes=A)
    assert arena.used_bytes == 4 * A


def test_a_freed_hole_is_filled_again_and_a_full_arena_refuses() -> None:
    arena = Arena(6 * A)
    for name in ("a", "b", "c"):
        arena.allocate(name, 2 * A)
    assert arena.allocate("d", A) is None
    arena.free("b")
    assert arena.allocate("d", 3 * A) is None
    assert arena.allocate("d", 2 * A) == Run(offset_bytes=2 * A, size_bytes=2 * A)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5 * A)), max_size=60))
def test_runs_never_overlap_and_a_refusal_means_no_gap(actions: list[tuple[int, int]]) -> None:
    arena = Arena(12 * A)
    for owner, size_bytes in actions:
        if str(owner) in arena.runs:
            arena.free(str(owner))
            continue
        before = arena.runs
        run = arena.allocate(str(owner), size_bytes)
        if run is None:
            assert lowest_gap(before.values(), 12 * A, size_bytes) is None
        ordered = sorted(arena.runs.values())
        assert all(left.end_bytes <= right.offset_bytes for left, right in itertools.pairwise(ordered))
        assert all(r.offset_bytes >= 0 and r.end_bytes <= 12 * A and r.offset_bytes % A == 0 for r in ordered)
