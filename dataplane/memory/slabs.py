"""Which slabs of a GPU group's buffer hold the weights of which model, and which hold KV. Bookkeeping only; no tensors.

    0            weights_slabs                          slabs
    |  weights only  |  weights or KV                     |
     runs, lowest gap first -->          <-- KV, highest first

A slab is in exactly one state: free, in the run of a model, allocated to KV, or moving (freed, but a transfer still
uses it). Evicted weights are not copied out, since the host keeps a copy (Aegaeon 5.2).

A model may lend slabs of its run to KV, those below `weights_slabs` too (Oneiros 5). They remain part of the run, and
the model reclaims them once KV has freed them. KV takes lent slabs last, and takes none that are withheld to be
reclaimed. And the limit may be lowered to `kv_from`, so that KV has the place in which another model would be loaded;
where it is raised again, KV stays until it is freed.
"""

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dataplane.memory.events import PASSED, Event, MoveList

ALIGNMENT_BYTES = 256


def aligned(size_bytes: int) -> int:
    """The size rounded up to `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """Consecutive slabs `[start, start + count)` of an arena."""

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def slabs(self) -> range:
        return range(self.start, self.end)


class SlabArena:
    """The slabs `0 .. slabs-1` of one buffer. KV takes a slab below `kv_from` only if a model lends it."""

    def __init__(self, slabs: int, *, weights_slabs: int) -> None:
        assert 0 <= weights_slabs <= slabs, (weights_slabs, slabs)
        self.slabs = slabs
        self.weights_slabs = self.kv_from = weights_slabs
        self._runs: dict[str, Run] = {}
        self._free = set(range(slabs))
        self._kv: set[int] = set()
        self._lent: set[int] = set()
        self._withheld: frozenset[int] = frozenset()
        self._borrowed: set[int] = set()
        self._moves: MoveList[tuple[int, ...]] = MoveList()
        # Free slabs that KV may take: those not lent first, the highest first. A slab that a run has taken, or that is
        # no longer lent, is dropped when it is popped; `_queued` keeps a slab from being queued twice.
        self._kv_queue = [(False, -slab) for slab in range(slabs - 1, weights_slabs - 1, -1)]
        self._queued = set(self._kv_queue)

    @property
    def runs(self) -> dict[str, Run]:
        """A copy of the runs by model."""
        return dict(self._runs)

    @property
    def free_slabs(self) -> int:
        return len(self._free)

    @property
    def free_kv_slabs(self) -> int:
        return sum(map(self._may_hold_kv, self._free))

    @property
    def free_withheld_slabs(self) -> int:
        return len(self._withheld & self._free)

    @property
    def kv_slabs(self) -> int:
        return len(self._kv)

    @property
    def moving_slabs(self) -> int:
        """Slabs that were freed while a transfer still uses them."""
        return sum(map(len, self._moves))

    @property
    def lent_in_transfer(self) -> bool:
        """Whether a transfer still uses a lent slab, which KV can use afterwards."""
        return any(not self._lent.isdisjoint(slabs) for slabs in self._moves)

    def unlent_kv_slabs(self, *, but: Collection[int] = ()) -> int:
        """How many slabs are allocated to KV and lent by no model, some slabs not counted."""
        return len(self._kv.difference(self._lent, but))

    def holds_kv(self, slabs: Iterable[int]) -> bool:
        """Whether one of these slabs is allocated to KV."""
        return not self._kv.isdisjoint(slabs)

    def limit_kv(self, kv_from: int) -> None:
        """Let KV take the slabs from `kv_from` on, at most `weights_slabs`; those that it has below stay its."""
        assert 0 <= kv_from <= self.weights_slabs, kv_from
        self.kv_from = kv_from
        self._borrowed = {slab for slab in self._kv if slab < kv_from}
        self._queue(self._free)

    def withhold(self, slabs: Iterable[int]) -> None:
        """Let KV take none of these lent slabs, and the others again; those that it has stay its. Else KV that has left
        them could take them again before they are all free, and they never would be.
        """
        withheld = self._lent.intersection(slabs)
        if withheld != self._withheld:
            self._withheld = frozenset(withheld)
            self._queue(self._free)

    @property
    def borrowed_slabs(self) -> frozenset[int]:
        """Slabs below `kv_from` that KV has."""
        return frozenset(self._borrowed)

    @property
    def stranded_slabs(self) -> frozenset[int]:
        """Slabs below `kv_from` that KV has and no model lends."""
        return frozenset(self._borrowed - self._lent)

    @property
    def blocked(self) -> frozenset[int]:
        """Slabs that an eviction of weights cannot free: those of KV and those that are moving."""
        return frozenset(self._kv).union(*self._moves)

    def take_run(self, owner: str, start: int, count: int) -> None:
        """Allocate the slabs `[start, start + count)` to `owner`, which has at most one run.

        Raises:
            ValueError: the owner has a run, or the slabs are not all free.
        """
        run = Run(start=start, count=count)
        if owner in self._runs:
            raise ValueError(f"{owner} has a run already: {self._runs[owner]}")
        if count < 1 or not self._free.issuperset(run.slabs) or not self._lent.isdisjoint(run.slabs):
            raise ValueError(f"{run} is not free for {owner}")
        self._free.difference_update(run.slabs)
        self._runs[owner] = run

    def free_run(self, owner: str, after: Event = PASSED) -> None:
        """Free the owner's run. Its slabs are free as soon as `after` is done; those that it lent, as soon as KV frees
        them.

        Raises:
            KeyError: it has none.
        """
        run = self._runs.pop(owner)
        own = [slab for slab in run.slabs if slab not in self._lent]
        lent = self._lent.intersection(run.slabs)
        self._lent -= lent
        self._withheld -= lent
        self._queue(lent & self._free)
        self._free_after(own, after)

    def lend(self, owner: str, slabs: Iterable[int], after: Event = PASSED) -> None:
        """Lend slabs of the owner's run to KV, which can use them as soon as `after` is done.

        Raises:
            KeyError: it has no run.
            ValueError: they are not all of its run, or are lent already.
        """
        own = set(self._runs[owner].slabs)
        lent = set(slabs)
        if not lent <= own or not self._lent.isdisjoint(lent):
            raise ValueError(f"{sorted(lent)} are not all slabs of {owner} that are not lent")
        self._lent |= lent
        self._free_after(lent, after)

    def reclaim(self, owner: str, slabs: Iterable[int]) -> bool:
        """End the loan of all these slabs or of none; False while KV or a transfer uses one of them.

        Raises:
            KeyError: the owner has no run.
            ValueError: they are not all lent by it.
        """
        lent = set(slabs)
        if not lent <= self._lent.intersection(self._runs[owner].slabs):
            raise ValueError(f"{sorted(lent)} are not all lent by {owner}")
        if not lent <= self._free:
            return False
        self._free -= lent
        self._lent -= lent
        self._withheld -= lent
        return True

    def take_kv(self) -> int | None:
        """Allocate the highest free slab that is not lent, else the highest that is; None without any."""
        while self._kv_queue:
            entry = heapq.heappop(self._kv_queue)
            self._queued.remove(entry)
            lent, slab = entry[0], -entry[1]
            if slab in self._free and lent == (slab in self._lent) and self._may_hold_kv(slab):
                self._free.remove(slab)
                self._kv.add(slab)
                if slab < self.kv_from:
                    self._borrowed.add(slab)
                return slab
        return None

    def free_kv(self, slab: int) -> None:
        """Free a slab. Raises KeyError if it is not allocated to KV."""
        self._kv.remove(slab)
        self._borrowed.discard(slab)
        self._release((slab,))

    def settle(self) -> None:
        """Free the slabs whose transfers are done."""
        for slabs in self._moves.take_done():
            self._release(slabs)

    def check(self) -> None:
        """Assert that each slab is in exactly one state and that KV finds every slab it may take."""
        of_runs = [slab for run in self._runs.values() for slab in run.slabs]
        moving = [slab for slabs in self._moves for slab in slabs]
        slabs = [*self._free, *self._kv, *moving, *(slab for slab in of_runs if slab not in self._lent)]
        assert sorted(slabs) == list(range(self.slabs)), f"lost or doubled slabs: {self._runs}, {moving}"
        assert len(set(of_runs)) == len(of_runs), f"runs overlap: {self._runs}"
        assert self._lent.issubset(of_runs), "a lent slab is in no run"
        assert self._withheld <= self._lent, "a withheld slab is not lent"
        assert {slab for slab in self._kv if slab < self.kv_from} == self._borrowed, "borrowed slabs are not known"
        assert sorted(self._queued) == sorted(self._kv_queue), "the KV queue and its index differ"
        findable = {self._entry(slab) for slab in self._free if self._may_hold_kv(slab)}
        assert findable <= self._queued, "KV cannot find a free slab"

    def _may_hold_kv(self, slab: int) -> bool:
        return (slab >= self.kv_from or slab in self._lent) and slab not in self._withheld

    def _entry(self, slab: int) -> tuple[bool, int]:
        return slab in self._lent, -slab

    def _free_after(self, slabs: Iterable[int], after: Event) -> None:
        if after.done():
            self._release(slabs)
        else:
            self._moves.add(tuple(slabs), after)

    def _release(self, slabs: Iterable[int]) -> None:
        slabs = tuple(slabs)
        self._free.update(slabs)
        self._queue(slabs)

    def _queue(self, slabs: Iterable[int]) -> None:
        for slab in slabs:
            if self._may_hold_kv(slab) and (entry := self._entry(slab)) not in self._queued:
                self._queued.add(entry)
                heapq.heappush(self._kv_queue, entry)
