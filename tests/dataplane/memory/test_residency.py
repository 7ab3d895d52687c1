import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.memory.events import FlagEvent
from dataplane.memory.residency import ResidencyFacts, ResidentModel, RunChoice, choose_run
from dataplane.memory.slabs import SlabArena


def resident(model: str, start: int, count: int, used_s: float, *, pinned: bool = False) -> ResidentModel:
    return ResidentModel(model=model, start=start, count=count, used_s=used_s, pinned=pinned)


# Slabs 0..9: a a a b b b b c c .
A, B, C = resident("a", 0, 3, 5.0), resident("b", 3, 4, 9.0), resident("c", 7, 2, 1.0)
B_RUNS = resident("b", 3, 4, 9.0, pinned=True)


@pytest.mark.parametrize(
    ("needed", "home", "residents", "blocked", "start", "evictions"),
    [
        (1, None, (A, B, C), (), 9, ()),  # the end is free
        (1, 4, (A, B, C), (), 4, ("b",)),  # home is preferred
        (1, 4, (A, B_RUNS, C), (), 9, ()),  # but no running model is evicted for it
        (1, 9, (A, B, C), (9,), 7, ("c",)),  # nor is KV: the oldest model is evicted
        (3, 8, (A, B, C), (), 7, ("c",)),  # home does not reach beyond the end
        (2, 0, (B, C), (), 0, ()),  # home is free
        (2, None, (A, C), (), 3, ()),  # the lowest gap of two
        (2, None, (A, C), (4,), 5, ()),  # that is whole
        (2, None, (A, B, C), (), 7, ("c",)),
        (3, None, (A, B, C), (), 7, ("c",)),  # c and the free slab
        (3, None, (A, B, C), (9,), 0, ("a",)),
        (4, None, (A, B, C), (), 3, ("b",)),  # none of 4 without b, and b alone will do
        (7, None, (A, B, C), (), 3, ("b", "c")),  # b is needed, and c is older than a
        (10, None, (A, B, C), (), 0, ("a", "b", "c")),
        (4, None, (A, B_RUNS, C), (), None, ()),  # 3 below and 3 above
        (11, None, (), (), None, ()),
        (1, None, (), range(10), None, ()),
    ],
)
def test_home_then_a_gap_then_the_longest_unused(
    needed: int,
    home: int | None,
    residents: tuple[ResidentModel, ...],
    blocked: tuple[int, ...],
    start: int | None,
    evictions: tuple[str, ...],
) -> None:
    choice = choose_run(facts(needed, home, residents, frozenset(blocked)))
    if start is None:
        assert choice is None
        return
    assert choice is not None
    assert (choice.start, choice.evictions) == (start, evictions)


def facts(
    needed: int, home: int | None, residents: tuple[ResidentModel, ...], blocked: frozenset[int], slabs: int = 10
) -> ResidencyFacts:
    return ResidencyFacts(
        model="new",
        slabs_needed=needed,
        home=home,
        slabs=slabs,
        residents=residents,
        blocked=blocked,
    )


def options(f: ResidencyFacts) -> dict[int, tuple[ResidentModel, ...]]:
    """By brute force: every start at which the model fits, and whom it evicts there."""
    found = {}
    for start in range(f.slabs - f.slabs_needed + 1):
        run = set(range(start, start + f.slabs_needed))
        evicted = tuple(r for r in f.residents if run & set(range(r.start, r.end)))
        if not run & f.blocked and not any(r.pinned for r in evicted):
            found[start] = evicted
    return found


def assert_best(f: ResidencyFacts, choice: RunChoice | None) -> None:
    """The choice is one of the options, and the best of them."""
    possible = options(f)
    if not possible:
        assert choice is None
        return
    assert choice is not None
    assert choice.start in possible
    assert choice.evictions == tuple(r.model for r in possible[choice.start])
    if f.home in possible:
        assert choice.start == f.home
        return
    gaps = [start for start, evicted in possible.items() if not evicted]
    if gaps:
        assert (choice.start, choice.evictions) == (min(gaps), ())
        return
    latest = {start: sorted((r.used_s for r in evicted), reverse=True) for start, evicted in possible.items()}
    assert latest[choice.start] == min(latest.values())
    assert choice.start == min(start for start in latest if latest[start] == latest[choice.start])


@st.composite
def arenas(draw: st.DrawFn) -> ResidencyFacts:
    residents, blocked, position = [], set(), 0
    for number in range(draw(st.integers(0, 8))):
        kind, size = draw(st.sampled_from(["model", "pinned", "blocked", "gap"])), draw(st.integers(1, 5))
        if kind == "blocked":
            blocked.update(range(position, position + size))
        elif kind != "gap":
            used_s = float(draw(st.integers(0, 5)))
            residents.append(resident(str(number), position, size, used_s, pinned=kind == "pinned"))
        position += size
    slabs = position + draw(st.integers(0, 3))
    return facts(
        draw(st.integers(1, 8)),
        draw(st.none() | st.integers(0, slabs)),
        tuple(draw(st.permutations(residents))),
        frozenset(blocked),
        slabs,
    )


@given(arenas())
@settings(max_examples=500)
def test_no_run_is_better_than_the_one_chosen(f: ResidencyFacts) -> None:
    choice = choose_run(f)
    assert_best(f, choice)


SIZES = {"a": 3, "b": 5, "c": 2, "d": 7, "e": 4}


class ResidencyMachine(RuleBasedStateMachine):
    """Choices applied to a real arena with KV and with weights that transfers still read."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = SlabArena(16, weights_slabs=8)
        self.clock_s = 0.0
        self.used_s: dict[str, float] = {}
        self.homes: dict[str, int] = {}
        self.pinned: frozenset[str] = frozenset()
        self.kv: list[int] = []
        self.events: list[FlagEvent] = []

    @rule(model=st.sampled_from("abcde"), pinned=st.frozensets(st.sampled_from("abcde"), max_size=2))
    def a_model_is_loaded(self, model: str, pinned: frozenset[str]) -> None:
        self.clock_s += 1
        runs = self.arena.runs
        if model not in runs:
            f = ResidencyFacts(
                model=model,
                slabs_needed=SIZES[model],
                home=self.homes.get(model),
                slabs=self.arena.slabs,
                residents=tuple(
                    resident(name, run.start, run.count, self.used_s[name], pinned=name in pinned)
                    for name, run in runs.items()
                ),
                blocked=self.arena.blocked,
            )
            choice = choose_run(f)
            assert_best(f, choice)
            if choice is None:
                return
            for evicted in choice.evictions:
                assert evicted not in pinned
                self.arena.free_run(evicted)
            self.arena.take_run(model, choice.start, f.slabs_needed)
            self.homes[model] = choice.start
        self.used_s[model] = self.clock_s

    @rule()
    def kv_grows(self) -> None:
        slab = self.arena.take_kv()
        if slab is not None:
            self.kv.append(slab)

    @precondition(lambda self: self.kv)
    @rule()
    def kv_shrinks(self) -> None:
        self.arena.free_kv(self.kv.pop(0))

    @precondition(lambda self: self.arena.runs)
    @rule(data=st.data())
    def a_model_is_evicted_while_it_is_read(self, data: st.DataObject) -> None:
        self.events.append(FlagEvent())
        self.arena.free_run(data.draw(st.sampled_from(sorted(self.arena.runs))), self.events[-1])

    @precondition(lambda self: self.events)
    @rule(data=st.data(), fails=st.booleans())
    def a_read_ends(self, data: st.DataObject, fails: bool) -> None:
        event = self.events.pop(data.draw(st.integers(0, len(self.events) - 1)))
        event.finish(OSError() if fails else None)
        self.arena.settle()

    @invariant()
    def nothing_overlaps_or_is_lost(self) -> None:
        self.arena.check()


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40)
