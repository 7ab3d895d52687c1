"""Which slabs of a slot's one buffer hold whose weights, and which hold KV. Bookkeeping only: the buffer is elsewhere.

    0            weights_slabs                          slabs
    |  weights only  |  weights or KV                     |
     runs, lowest gap first -->          <-- KV, highest first

A slab is in exactly one state: free, in the run of a model, handed out for KV, or moving (given back, but a transfer
still touches it). Freeing weights is forgetting them, for the host keeps a copy (Aegaeon 5.2).

A model may lend slabs of its run to KV, those below `weights_slabs` too (Oneiros 5). They stay its place: no other run
takes them while it has its own, and it takes them back once KV has left them. KV takes lent slabs last.
"""

import heapq
from collections.abc import Iterable
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
        """The first slab after the run."""
        return self.start + self.count

    @property
    def slabs(self) -> range:
        """The numbers of its slabs."""
        return range(self.start, self.end)


class SlabArena:
    """The slabs `0 .. slabs-1` of one buffer. KV takes one below `weights_slabs` only where a model lends it."""

    def __init__(self, slabs: int, *, weights_slabs: int) -> None:
        assert 0 <= weights_slabs <= slabs, (weights_slabs, slabs)
        self.slabs = slabs
        self.weights_slabs = weights_slabs
        self._runs: dict[str, Run] = {}
        self._free = set(range(slabs))
        self._kv: set[int] = set()
        self._lent: set[int] = set()
        self._guests: set[int] = set()
        self._moves: MoveList[tuple[int, ...]] = MoveList()
        # Free slabs that KV may take: those that nobody lends first, the highest first. One that a run has taken, or
        # that is no longer lent, leaves when it comes to the top, so `_queued` says which are in it: none is twice.
        self._kv_queue = [(False, -slab) for slab in range(slabs - 1, weights_slabs - 1, -1)]
        self._queued = set(self._kv_queue)

    @property
    def runs(self) -> dict[str, Run]:
        """A copy of which model lies where."""
        return dict(self._runs)

    @property
    def free_slabs(self) -> int:
        """Slabs that can be handed out, for weights at least."""
        return len(self._free)

    @property
    def free_kv_slabs(self) -> int:
        """Slabs that can be handed out for KV."""
        return sum(map(self._may_hold_kv, self._free))

    @property
    def kv_slabs(self) -> int:
        """Slabs handed out for KV."""
        return len(self._kv)

    @property
    def moving_slabs(self) -> int:
        """Slabs given back that a transfer still touches."""
        return sum(map(len, self._moves))

    @property
    def lent_moving(self) -> bool:
        """Whether KV gets a lent slab soon, that a transfer still touches."""
        return any(not self._lent.isdisjoint(slabs) for slabs in self._moves)

    @property
    def stray_kv_slabs(self) -> int:
        """Slabs handed out for KV that no model has lent."""
        return len(self._kv - self._lent)

    @property
    def guests(self) -> frozenset[int]:
        """Slabs below `weights_slabs` that KV has, since a model lent them."""
        return frozenset(self._guests)

    @property
    def blocked(self) -> frozenset[int]:
        """Slabs that no eviction of weights frees: those of KV and those that are moving."""
        return frozenset(self._kv).union(*self._moves)

    def take_run(self, owner: str, start: int, count: int) -> None:
        """Give `owner` the slabs `[start, start + count)`. An owner has at most one run.

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
        """Take the owner's run back. Its slabs are free as soon as `after` is done; those that it lent, as soon as KV
        has left them.

        Raises:
            KeyError: it has none.
        """
        run = self._runs.pop(owner)
        own = [slab for slab in run.slabs if slab not in self._lent]
        lent = self._lent.intersection(run.slabs)
        self._lent -= lent
        self._queue(lent & self._free)
        self._give_back(own, after)

    def lend(self, owner: str, slabs: Iterable[int], after: Event = PASSED) -> None:
        """Let KV have slabs of the owner's run, as soon as `after` is done.

        Raises:
            KeyError: it has no run.
            ValueError: they are not all of its run, or lent already.
        """
        own = set(self._runs[owner].slabs)
        lent = set(slabs)
        if not lent <= own or not self._lent.isdisjoint(lent):
            raise ValueError(f"{sorted(lent)} are not all slabs of {owner} that it has itself")
        self._lent |= lent
        self._give_back(lent, after)

    def take_back(self, owner: str, slabs: Iterable[int]) -> bool:
        """End a loan, of all these slabs or none; False while KV or a transfer has one of them.

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
        return True

    def take_kv(self) -> int | None:
        """Hand out a free slab that KV may take: the highest that nobody lends, else the highest; None without any."""
        while self._kv_queue:
            entry = heapq.heappop(self._kv_queue)
            self._queued.remove(entry)
            lent, slab = entry[0], -entry[1]
            if slab in self._free and lent == (slab in self._lent) and self._may_hold_kv(slab):
                self._free.remove(slab)
                self._kv.add(slab)
                if slab < self.weights_slabs:
                    self._guests.add(slab)
                return slab
        return None

    def free_kv(self, slab: int) -> None:
        """Take back a slab that no block is left in.

        Raises:
            KeyError: KV does not have it.
        """
        self._kv.remove(slab)
        self._guests.discard(slab)
        self._release((slab,))

    def settle(self) -> None:
        """Free the runs whose transfers are over."""
        for slabs in self._moves.take_done():
            self._release(slabs)

    def check(self) -> None:
        """Assert that each slab is in exactly one state and that KV finds every slab it may take."""
        of_runs = [slab for run in self._runs.values() for slab in run.slabs]
        moving = [slab for slabs in self._moves for slab in slabs]
        slabs = [*self._free, *self._kv, *moving, *(slab for slab in of_runs if slab not in self._lent)]
        assert sorted(slabs) == list(range(self.slabs)), f"lost or doubled slabs: {self._runs}, {moving}"
        assert len(set(of_runs)) == len(of_runs), f"runs overlap: {self._runs}"
        assert self._lent.issubset(of_runs), "a slab is lent by nobody"
        assert {slab for slab in self._kv if slab < self.weights_slabs} == self._guests, "KV that no model lent room"
        assert sorted(self._queued) == sorted(self._kv_queue), "the KV queue and its index differ"
        findable = {self._entry(slab) for slab in self._free if self._may_hold_kv(slab)}
        assert findable <= self._queued, "KV cannot find a free slab"

    def _may_hold_kv(self, slab: int) -> bool:
        return slab >= self.weights_slabs or slab in self._lent

    def _entry(self, slab: int) -> tuple[bool, int]:
        return slab in self._lent, -slab

    def _give_back(self, slabs: Iterable[int], after: Event) -> None:
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
