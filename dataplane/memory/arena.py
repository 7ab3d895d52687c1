"""Which bytes of a slot's one weight buffer belong to which model. Bookkeeping only: the buffer itself is elsewhere.

Allocation takes the lowest gap that fits. While nothing was freed in the middle that is a bump allocation (Aegaeon 5):
models lie one after another, and freeing is forgetting, for the host keeps a copy of every weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """Consecutive bytes `[offset_bytes, offset_bytes + size_bytes)` of an arena."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte after the run."""
        return self.offset_bytes + self.size_bytes


def aligned(size_bytes: int) -> int:
    """The size rounded up to `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def lowest_gap(runs: Iterable[Run], capacity_bytes: int, needed_bytes: int) -> Run | None:
    """The lowest `needed_bytes` between disjoint `runs` and the end of the arena; None when no gap is that wide."""
    position = 0
    for run in sorted(runs):
        if run.offset_bytes - position >= needed_bytes:
            break
        position = run.end_bytes
    if position + needed_bytes > capacity_bytes:
        return None
    return Run(offset_bytes=position, size_bytes=needed_bytes)


class Arena:
    """The runs of one buffer, by owner. An owner has at most one run."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self._runs: dict[str, Run] = {}

    @property
    def runs(self) -> dict[str, Run]:
        """A copy of who owns what."""
        return dict(self._runs)

    @property
    def used_bytes(self) -> int:
        """Bytes owned by somebody."""
        return sum(run.size_bytes for run in self._runs.values())

    def allocate(self, owner: str, size_bytes: int) -> Run | None:
        """Give `owner` an aligned run of at least `size_bytes`, or None when no gap is wide enough."""
        assert owner not in self._runs, f"{owner} has a run already"
        run = lowest_gap(self._runs.values(), self.capacity_bytes, aligned(size_bytes))
        if run is not None:
            self._runs[owner] = run
        return run

    def free(self, owner: str) -> None:
        """Take the owner's run back.

        Raises:
            KeyError: it has none.
        """
        del self._runs[owner]
