"""How the GPUs of a node are grouped into slots. Control plane, agents and simulator share this geometry.

A layout is the sizes of a node's slots in the order of their GPUs: `(4, 1, 1, 2)` is a slot of GPUs 0 to 3, slots of
GPU 4 and of GPU 5, and one of GPUs 6 and 7. Sizes are powers of two and a slot begins at a multiple of its size, as in
a buddy allocator: two layouts differ in blocks in which one slot takes the place of several, or several that of one,
and no block touches another. A slot's number is that of its first GPU, so that a slot which stays keeps its number.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

Layout = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """GPUs that are regrouped together. `going`, `coming`: numbers of the slots before and after."""

    first: int
    gpus: int
    going: tuple[int, ...]
    coming: tuple[int, ...]


def check_layout(layout: Sequence[int], gpus: int) -> None:
    """Check that a node with so many GPUs can be grouped like that.

    Raises:
        ValueError: says which slot cannot be, and why.
    """
    first = 0
    for size in layout:
        if size < 1 or size & (size - 1):
            raise ValueError(f"a slot has 1, 2, 4, 8, ... GPUs, not {size}")
        if first % size:
            raise ValueError(f"a slot of {size} GPUs begins at a multiple of {size}, not at GPU {first}")
        first += size
    if first != gpus:
        raise ValueError(f"the slots have {first} GPUs, the node has {gpus}")


def slots_of(layout: Sequence[int]) -> dict[int, int]:
    """The GPUs of each slot, by the slot's number."""
    slots, first = {}, 0
    for size in layout:
        slots[first] = size
        first += size
    return slots


def memory_like(gpus: int, *, of_bytes: int, of_gpus: int) -> int:
    """Memory of a slot of so many GPUs that are like those of another slot, which has `of_bytes` on `of_gpus`; in whole
    bytes of a GPU, at least one.
    """
    return max(1, of_bytes // of_gpus) * gpus


def blocks_between(before: Layout, after: Layout) -> Iterator[Block]:
    """The blocks in which two layouts of one node differ, by their first GPU."""
    old, new = slots_of(before), slots_of(after)
    larger = {first: size for first, size in old.items() if size > new.get(first, 0)}
    larger |= {first: size for first, size in new.items() if size > old.get(first, 0)}
    end = 0
    for first, size in sorted(larger.items()):
        if first < end:  # inside a block already
            continue
        end = first + size
        yield Block(
            first=first,
            gpus=size,
            going=tuple(slot for slot in old if first <= slot < end),
            coming=tuple(slot for slot in new if first <= slot < end),
        )


def going_slots(before: Layout, after: Layout) -> frozenset[int]:
    """Numbers of the slots that another layout does not keep."""
    return frozenset(slot for block in blocks_between(before, after) for slot in block.going)


def advanced(before: Layout, after: Layout, busy: Collection[int]) -> Layout:
    """The layout on the way to another in which those blocks have changed whose slots are all empty.

    Args:
        before: the present layout.
        after: the wanted layout.
        busy: numbers of present slots that are not empty.
    """
    slots, new = slots_of(before), slots_of(after)
    for block in blocks_between(before, after):
        if not set(block.going) & set(busy):
            slots = {slot: size for slot, size in slots.items() if slot not in block.going}
            slots |= {slot: new[slot] for slot in block.coming}
    return tuple(size for _, size in sorted(slots.items()))
