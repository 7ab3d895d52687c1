import pickle
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.memory.events import FlagEvent
from dataplane.memory.slabs import ALIGNMENT_BYTES, Run, SlabArena, aligned


@pytest.mark.parametrize(("size", "up"), [(0, 0), (1, 1), (ALIGNMENT_BYTES, 1), (ALIGNMENT_BYTES + 1, 2)])
def test_sizes_are_aligned(size: int, up: int) -> None:
    assert aligned(size) == up * ALIGNMENT_BYTES


def test_weights_are_allocated_from_below_and_kv_from_above() -> None:
    arena = SlabArena(6, weights_slabs=2)
    arena.take_run("a", 0, 3)
    assert [arena.take_kv() for _ in range(4)] == [5, 4, 3, None]
    assert arena.runs == {"a": Run(start=0, count=3)}
    assert (arena.free_slabs, arena.kv_slabs, arena.moving_slabs) == (0, 3, 0)
    arena.free_run("a")
    assert arena.take_kv() == 2
    assert arena.take_kv() is None, "slabs 0 and 1 are for weights"
    arena.check()


def test_a_run_that_a_transfer_still_reads_is_not_free() -> None:
    arena = SlabArena(4, weights_slabs=0)
    copied = FlagEvent()
    arena.take_run("a", 1, 3)
    arena.free_run("a", copied)
    arena.settle()
    assert (arena.free_slabs, arena.moving_slabs, arena.blocked) == (1, 3, {1, 2, 3})
    assert [arena.take_kv(), arena.take_kv()] == [0, None]
    with pytest.raises(ValueError, match="not free"):
        arena.take_run("a", 3, 1)
    copied.finish(OSError("failed, so it is over"))
    assert arena.take_kv() is None, "only settling frees"
    arena.settle()
    arena.take_run("a", 1, 2)
    assert (arena.take_kv(), arena.blocked) == (3, {0, 3})
    arena.check()


def test_wrong_use_raises_and_changes_nothing() -> None:
    arena = SlabArena(4, weights_slabs=1)
    arena.take_run("a", 0, 2)
    for owner, start, count in (("a", 2, 1), ("b", 1, 2), ("b", 3, 2), ("b", -1, 1), ("b", 2, 0)):
        with pytest.raises(ValueError, match=r"already|not free"):
            arena.take_run(owner, start, count)
    for wrong in (lambda: arena.free_run("b"), lambda: arena.free_kv(3), lambda: arena.free_kv(0)):
        with pytest.raises(KeyError):
            wrong()
    arena.check()
    assert (arena.free_slabs, arena.runs) == (2, {"a": Run(start=0, count=2)})


def test_an_arena_does_not_grow_with_the_runs_that_it_had() -> None:
    arena = SlabArena(8, weights_slabs=2)
    sizes = []
    for _ in range(50):
        arena.take_run("a", 0, 7)
        arena.free_run("a")
        sizes.append(len(pickle.dumps(arena)))
    assert sizes[-1] == sizes[0]


def test_kv_takes_lent_slabs_last_and_only_free_ones_are_reclaimed() -> None:
    arena = SlabArena(6, weights_slabs=4)
    arena.take_run("a", 1, 4)
    copied = FlagEvent()
    arena.lend("a", [4])
    arena.lend("a", [2, 3], copied)
    assert (arena.free_kv_slabs, arena.moving_slabs) == (2, 2)
    assert [arena.take_kv() for _ in range(3)] == [5, 4, None]
    copied.finish()
    arena.settle()
    assert [arena.take_kv(), arena.borrowed_slabs] == [3, {3}]
    assert not arena.reclaim("a", [2, 3]), "KV uses one of them"
    assert arena.reclaim("a", [2])
    assert arena.take_kv() is None
    arena.free_kv(3)
    assert arena.reclaim("a", [3])
    assert (arena.free_kv_slabs, arena.borrowed_slabs) == (0, frozenset())
    arena.check()


def test_kv_takes_no_lent_slab_that_is_withheld_until_it_is_not() -> None:
    arena = SlabArena(5, weights_slabs=4)
    arena.take_run("a", 0, 4)
    arena.lend("a", [1, 2, 3])
    assert [arena.take_kv(), arena.take_kv()] == [4, 3]
    arena.withhold([2, 3])
    assert (arena.free_kv_slabs, arena.free_withheld_slabs) == (1, 1)
    arena.free_kv(3)
    assert [arena.take_kv(), arena.take_kv()] == [1, None]
    assert arena.free_withheld_slabs == 2
    arena.check()
    arena.withhold([3])
    assert arena.take_kv() == 2
    assert arena.reclaim("a", [3])
    arena.check()


def test_kv_keeps_lent_slabs_after_their_model_is_evicted() -> None:
    arena = SlabArena(4, weights_slabs=3)
    arena.take_run("a", 0, 3)
    arena.lend("a", [0, 1])
    assert [arena.take_kv(), arena.take_kv()] == [3, 1]
    with pytest.raises(ValueError, match="not free"):
        arena.take_run("b", 0, 1)
    arena.free_run("a")
    assert (arena.free_slabs, arena.free_kv_slabs, arena.borrowed_slabs) == (2, 0, {1})
    assert arena.take_kv() is None, "slab 0 is for weights again"
    arena.take_run("b", 0, 1)
    arena.free_kv(1)
    arena.take_run("c", 1, 2)
    arena.check()


def test_wrong_loans_raise_and_change_nothing() -> None:
    arena = SlabArena(4, weights_slabs=4)
    arena.take_run("a", 0, 2)
    arena.lend("a", [0])
    for wrong in (
        lambda: arena.lend("a", [0]),
        lambda: arena.lend("a", [1, 2]),
        lambda: arena.reclaim("a", [0, 1]),
    ):
        with pytest.raises(ValueError, match="are not all"):
            wrong()
    with pytest.raises(KeyError):
        arena.lend("b", [3])
    arena.check()
    assert (arena.free_kv_slabs, arena.free_slabs) == (1, 3)


class ArenaMachine(RuleBasedStateMachine):
    """A model of the arena: a state for each slab."""

    SLABS, WEIGHTS_SLABS = 12, 4

    def __init__(self) -> None:
        super().__init__()
        self.arena = SlabArena(self.SLABS, weights_slabs=self.WEIGHTS_SLABS)
        self.state = ["free"] * self.SLABS
        self.kv_from = self.WEIGHTS_SLABS
        self.runs: dict[str, range] = {}
        self.lent: set[int] = set()
        self.withheld: set[int] = set()
        self.events: list[tuple[FlagEvent, list[int]]] = []

    def fill(self, slabs: Iterable[int], state: str) -> None:
        for slab in slabs:
            self.state[slab] = state

    def event_for(self, slabs: list[int], in_flight: bool) -> FlagEvent:
        event = FlagEvent()
        if in_flight:
            self.events.append((event, slabs))
        else:
            event.finish()
        self.fill(slabs, "moving" if in_flight else "free")
        return event

    @rule(owner=st.sampled_from("abcd"), start=st.integers(0, 11), count=st.integers(1, 6))
    def take_run(self, owner: str, start: int, count: int) -> None:
        slabs = range(start, start + count)
        free = slabs.stop <= self.SLABS and all(self.state[slab] == "free" and slab not in self.lent for slab in slabs)
        if owner in self.runs or not free:
            with pytest.raises(ValueError, match=r"already|not free"):
                self.arena.take_run(owner, start, count)
            return
        self.arena.take_run(owner, start, count)
        self.runs[owner] = slabs
        self.fill(slabs, "weights")

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), in_flight=st.booleans())
    def free_run(self, data: st.DataObject, in_flight: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.runs)))
        slabs = self.runs.pop(owner)
        own = [slab for slab in slabs if slab not in self.lent]
        self.lent.difference_update(slabs)
        self.withheld.difference_update(slabs)
        self.arena.free_run(owner, self.event_for(own, in_flight))

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), in_flight=st.booleans())
    def lend(self, data: st.DataObject, in_flight: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.runs)))
        slabs = [slab for slab in self.runs[owner] if slab not in self.lent and data.draw(st.booleans())]
        self.lent.update(slabs)
        self.arena.lend(owner, slabs, self.event_for(slabs, in_flight))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        slab = data.draw(st.sampled_from(sorted(self.lent)))
        owner = next(owner for owner, slabs in self.runs.items() if slab in slabs)
        is_free = self.state[slab] == "free"
        assert self.arena.reclaim(owner, [slab]) is is_free
        if is_free:
            self.lent.remove(slab)
            self.withheld.discard(slab)
            self.state[slab] = "weights"

    @rule(kv_from=st.integers(0, WEIGHTS_SLABS))
    def limit_kv(self, kv_from: int) -> None:
        self.kv_from = kv_from
        self.arena.limit_kv(kv_from)

    @rule(slabs=st.sets(st.integers(0, SLABS - 1)))
    def withhold(self, slabs: set[int]) -> None:
        self.withheld = self.lent & slabs
        self.arena.withhold(slabs)

    @property
    def for_kv(self) -> set[int]:
        return self.lent.union(range(self.kv_from, self.SLABS)) - self.withheld

    @rule()
    def take_kv(self) -> None:
        free = [slab for slab in self.for_kv if self.state[slab] == "free"]
        slab = self.arena.take_kv()
        assert slab == max(free, key=lambda slab: (slab not in self.lent, slab), default=None)
        if slab is not None:
            self.state[slab] = "kv"

    @precondition(lambda self: "kv" in self.state)
    @rule(data=st.data())
    def free_kv(self, data: st.DataObject) -> None:
        slab = data.draw(st.sampled_from([slab for slab in range(self.SLABS) if self.state[slab] == "kv"]))
        self.arena.free_kv(slab)
        self.state[slab] = "free"

    @precondition(lambda self: self.events)
    @rule(data=st.data(), fails=st.booleans(), settle=st.booleans())
    def a_transfer_ends(self, data: st.DataObject, fails: bool, settle: bool) -> None:
        open_events = [i for i, (event, _) in enumerate(self.events) if not event.done()]
        if open_events:
            self.events[data.draw(st.sampled_from(open_events))][0].finish(OSError() if fails else None)
        if settle:
            self.arena.settle()
            for event, slabs in self.events:
                if event.done():
                    self.fill(slabs, "free")
            self.events = [(event, slabs) for event, slabs in self.events if not event.done()]

    @invariant()
    def every_slab_has_the_state_of_the_model(self) -> None:
        self.arena.check()
        counted = [self.state.count(state) for state in ("free", "kv", "moving")]
        assert [self.arena.free_slabs, self.arena.kv_slabs, self.arena.moving_slabs] == counted
        assert {owner: run.slabs for owner, run in self.arena.runs.items()} == self.runs
        free = {slab for slab in range(self.SLABS) if self.state[slab] == "free"}
        assert self.arena.free_kv_slabs == len(free & self.for_kv)
        assert self.arena.free_withheld_slabs == len(free & self.withheld)
        assert self.arena.blocked == {slab for slab in range(self.SLABS) if self.state[slab] in {"kv", "moving"}}


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=80, stateful_step_count=40)


def test_kv_takes_the_place_of_weights_while_the_limit_is_lower_and_stays_until_it_is_freed() -> None:
    arena = SlabArena(8, weights_slabs=6)
    arena.take_run("a", 0, 3)
    arena.limit_kv(3)
    assert [arena.take_kv() for _ in range(6)] == [7, 6, 5, 4, 3, None]
    assert (arena.borrowed_slabs, arena.stranded_slabs) == (frozenset(), frozenset())
    arena.check()
    arena.free_kv(5)
    arena.limit_kv(6)
    arena.check()
    assert arena.take_kv() is None, "what is free there is for weights"
    assert arena.stranded_slabs == arena.borrowed_slabs == {3, 4}
    with pytest.raises(ValueError, match="is not free"):
        arena.take_run("b", 3, 3)
    for slab in (3, 4):
        arena.free_kv(slab)
    arena.take_run("b", 3, 3)
    arena.lend("b", [4])
    assert arena.take_kv() == 4
    assert (arena.borrowed_slabs, arena.stranded_slabs) == ({4}, frozenset()), "its model lends it"
    arena.check()
    arena.limit_kv(4)
    arena.check()
    assert arena.borrowed_slabs == frozenset()
