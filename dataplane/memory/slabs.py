"""Which slabs of a slot's one buffer hold whose weights, and which hold KV. Bookkeeping only: the buffer is elsewhere.

    0            weights_slabs                          slabs
    |  weights only  |  weights or KV                     |
     runs, lowest gap first -->          <-- KV, highest first

A slab is in exactly one state: free, in the run of a model, handed out for KV, or moving (given back, but a transfer
still touches it). Freeing weights is forgetting them, for the host keeps a copy (Aegaeon 5.2).
"""

import heapq
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
    """The slabs `0 .. slabs-1` of one buffer. KV never takes one below `weights_slabs`."""

    def __init__(self, slabs: int, *, weights_slabs: int) -> None:
        assert 0 <= weights_slabs <= slabs, (weights_slabs, slabs)
        self.slabs = slabs
        self.weights_slabs = weights_slabs
        self._runs: dict[str, Run] = {}
        self._free = set(range(slabs))
        self._kv: set[int] = set()
        self._moves: MoveList[Run] = MoveList()
        # Free slabs that KV may take, highest first, as negative numbers. One that a run has taken leaves when it
        # comes to the top, so `_queued` says which are in it: none is twice.
        self._kv_queue = [-slab for slab in range(slabs - 1, weights_slabs - 1, -1)]
        self._queued = set(range(weights_slabs, slabs))

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
        return sum(slab >= self.weights_slabs for slab in self._free)

    @property
    def kv_slabs(self) -> int:
        """Slabs handed out for KV."""
        return len(self._kv)

    @property
    def moving_slabs(self) -> int:
        """Slabs given back that a transfer still touches."""
        return sum(run.count for run in self._moves)

    @property
    def blocked(self) -> frozenset[int]:
        """Slabs that no eviction of weights frees: those of KV and those that are moving."""
        return frozenset(self._kv).union(*(run.slabs for run in self._moves))

    def take_run(self, owner: str, start: int, count: int) -> None:
        """Give `owner` the slabs `[start, start + count)`. An owner has at most one run.

        Raises:
            ValueError: the owner has a run, or the slabs are not all free.
        """
        run = Run(start=start, count=count)
        if owner in self._runs:
            raise ValueError(f"{owner} has a run already: {self._runs[owner]}")
        if count < 1 or not self._free.issuperset(run.slabs):
            raise ValueError(f"{run} is not free for {owner}")
        self._free.difference_update(run.slabs)
        self._runs[owner] = run

    def free_run(self, owner: str, after: Event = PASSED) -> None:
        """Take the owner's run back. Its slabs are free as soon as `after` is done.

        Raises:
            KeyError: it has none.
        """
        run = self._runs.pop(owner)
        if after.done():
            self._release(run)
        else:
            self._moves.add(run, after)

    def take_kv(self) -> int | None:
        """Hand out the highest free slab that KV may take; None when there is none."""
        while self._kv_queue:
            slab = -heapq.heappop(self._kv_queue)
            self._queued.remove(slab)
            if slab in self._free:
                self._free.remove(slab)
                self._kv.add(slab)
                return slab
        return None

    def free_kv(self, slab: int) -> None:
        """Take back a slab that no block is left in.

        Raises:
            KeyError: KV does not have it.
        """
        self._kv.remove(slab)
        self._release(Run(start=slab, count=1))

    def settle(self) -> None:
        """Free the runs whose transfers are over."""
        for run in self._moves.take_done():
            self._release(run)

    def check(self) -> None:
        """Assert that each slab is in exactly one state and that KV finds every slab it may take."""
        runs = [*self._runs.values(), *self._moves]
        slabs = [*self._free, *self._kv, *(slab for run in runs for slab in run.slabs)]
        assert sorted(slabs) == list(range(self.slabs)), f"lost or doubled slabs: {self._runs}, {list(self._moves)}"
        assert all(slab >= self.weights_slabs for slab in self._kv), "KV in the slabs reserved for weights"
        assert sorted(self._queued) == sorted(-slab for slab in self._kv_queue), "the KV queue and its index differ"
        assert self._queued >= {slab for slab in self._free if slab >= self.weights_slabs}, "KV cannot find a free slab"

    def _release(self, run: Run) -> None:
        self._free.update(run.slabs)
        for slab in range(max(run.start, self.weights_slabs), run.end):
            if slab not in self._queued:
                self._queued.add(slab)
                heapq.heappush(self._kv_queue, -slab)
