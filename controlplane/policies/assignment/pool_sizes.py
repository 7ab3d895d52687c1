"""Which slots make up a pool of so many GPUs.

A pool takes a slot whole, with all its workers, so it may be larger than planned; what it has in excess is what
instances of their own were planned on. So it takes slots that leave it no larger, those of most workers first: these
serve together, which keeps more models on as many GPUs. Where none is small enough, it takes the smallest.
"""

from collections.abc import Sequence
from enum import IntEnum

from controlplane.policies.assignment.facts import SlotRoom


class Holds(IntEnum):
    """What a slot holds, the best for a pool first. Leaving: instances of endpoints that are to be pooled."""

    POOLED = 0
    NOTHING = 1
    LEAVING = 2
    SPOT = 3
    LEASED = 4


Rank = tuple[Holds, int, float, tuple[str, int]]
"""How well a slot suits a pool, whatever its size, the smaller the better; its place comes last."""
_TURNS = ({Holds.POOLED}, {Holds.NOTHING, Holds.LEAVING, Holds.SPOT}, {Holds.LEASED})


def whole_slots(ranked: Sequence[tuple[Rank, SlotRoom]], gpus: int) -> list[SlotRoom]:
    """The slots of a pool of so many GPUs at least, if there are enough. It stays where it is, and no lessee gets
    notice for the sake of a better size.

    Args:
        ranked: slots that may join, by rank.
        gpus: what the plan gives to the pool.
    """
    taken: list[SlotRoom] = []
    for kinds in _TURNS:
        fitting: list[SlotRoom] = []
        larger: list[SlotRoom] = []
        for (kind, *_), slot in ranked:
            if kind not in kinds or gpus <= 0:
                continue
            fits = slot.gpus <= gpus or kind is Holds.POOLED
            (fitting if fits else larger).append(slot)
            gpus -= slot.gpus if fits else 0
        if gpus > 0 and larger:
            smallest = min(larger, key=lambda slot: slot.gpus)
            gpus -= smallest.gpus
            for slot in reversed(fitting):
                if slot.gpus <= -gpus:  # it is not needed any more
                    fitting.remove(slot)
                    gpus += slot.gpus
            fitting.append(smallest)
        taken += fitting
    return taken
