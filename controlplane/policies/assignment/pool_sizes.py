"""The slots of a pool of a planned size.

A pool takes a slot whole, with all its workers, so it may become larger than planned, by GPUs that were planned for
dedicated instances. So it prefers slots that fit its size, those with most workers first: these hold more models on as
many GPUs. Where no slot is small enough, it takes the smallest.
"""

from collections.abc import Sequence
from enum import IntEnum

from controlplane.policies.assignment.facts import SlotRef, SlotRoom


class Holds(IntEnum):
    """What a slot holds, the best for a pool first. LEAVING: dedicated instances of endpoints that are to be pooled."""

    POOLED = 0
    NOTHING = 1
    LEAVING = 2
    DONATED = 3
    LEASED = 4


Rank = tuple[Holds, int, float, int, SlotRef]
"""How well a slot suits a pool, whatever its size, the smaller the better; its `SlotRef` breaks ties."""
_ORDER = ({Holds.POOLED}, {Holds.NOTHING, Holds.LEAVING, Holds.DONATED}, {Holds.LEASED})


def whole_slots(ranked: Sequence[tuple[Rank, SlotRoom]], gpus: int) -> list[SlotRoom]:
    """The slots of a pool of so many GPUs at least, if there are enough. A pool keeps its slots, and no lease gets
    notice for a better size.

    Args:
        ranked: slots that may join, by rank.
        gpus: what the plan gives to the pool.
    """
    taken: list[SlotRoom] = []
    for kinds in _ORDER:
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
                if slot.gpus <= -gpus:
                    fitting.remove(slot)
                    gpus += slot.gpus
            fitting.append(smallest)
        taken += fitting
    return taken
