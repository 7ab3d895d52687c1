"""The unified KV cache: blocks of several shapes out of common slabs (Aegaeon 5.2). Bookkeeping only; no tensors.

A block holds the keys and values of `block_tokens` consecutive tokens of one sequence, contiguous over all layers. A
slab serves one shape while any of its blocks is in use, and is freed afterwards. Block `b` of a shape is the block
`b % n` of slab `b // n`, where `n` is `blocks_per_slab(shape)`. New blocks are taken from the fullest slab that has a
free one, so that the emptier slabs become free.

A block in use is held, or idle: then nobody needs it, but its contents are cached until its memory is needed.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dataplane.memory.events import PASSED, Event, MoveList


class OutOfBlocksError(Exception):
    """An allocation failed: `missing_blocks` are the blocks that the caller must free, or wait for."""

    def __init__(self, wanted_blocks: int, missing_blocks: int) -> None:
        super().__init__(f"{wanted_blocks} blocks wanted, {missing_blocks} too many")
        self.missing_blocks = missing_blocks


@dataclass(frozen=True, kw_only=True, order=True)
class KvShape:
    """What makes two models' KV blocks interchangeable. `itemsize`: bytes of one number."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    itemsize: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_tokens * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ShapeUsage:
    """Memory of the slabs of one shape.

    `held_bytes`: all of its slabs; `used_bytes`: blocks that cannot be allocated, among them `moving_bytes` of blocks
    that were freed while a transfer still uses them; `idle_bytes`: blocks that can, once their contents are dropped.
    """

    used_bytes: int
    held_bytes: int
    moving_bytes: int
    idle_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of the slabs that neither is used nor caches anything; 0 without slabs."""
        return 1.0 - (self.used_bytes + self.idle_bytes) / self.held_bytes if self.held_bytes else 0.0


class SlabSource(Protocol):
    """An allocator of slabs for KV: `SlabArena` on the device, `HostSlabs` in host memory."""

    def take_kv(self) -> int | None:
        """Allocate a slab; None if none is free."""
        ...

    def free_kv(self, slab: int) -> None:
        """Free an allocated slab."""
        ...


class HostSlabs:
    """The slabs `0 .. slabs-1` of a buffer for KV only."""

    def __init__(self, slabs: int) -> None:
        assert slabs >= 0, slabs
        self.slabs = slabs
        self._free = list(range(slabs))
        self._kv: set[int] = set()

    @property
    def free_slabs(self) -> int:
        return len(self._free)

    def take_kv(self) -> int | None:
        if not self._free:
            return None
        slab = self._free.pop()
        self._kv.add(slab)
        return slab

    def free_kv(self, slab: int) -> None:
        """Raises KeyError for a slab that is not allocated."""
        self._kv.remove(slab)
        self._free.append(slab)

    def check(self) -> None:
        assert sorted([*self._free, *self._kv]) == list(range(self.slabs)), "lost or doubled slabs"


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // block_tokens)


class _Pool:
    """The blocks of one shape. Free blocks are kept by slab; a slab with none of them in use is not kept."""

    def __init__(self, blocks_per_slab: int) -> None:
        self.blocks_per_slab = blocks_per_slab
        self.free: dict[int, list[int]] = {}  # by slab; every slab of the shape has its entry
        self.free_blocks = 0
        self.held: set[int] = set()
        self.idle: set[int] = set()
        self.clearing: dict[int, int] = {}  # by slab: its blocks that are idle or moving
        # (free blocks, -slab): the fullest first, of those the highest, since weights grow from below. An entry with an
        # outdated number is dropped when it is popped.
        self._fullest: list[tuple[int, int]] = []

    def add_slab(self, slab: int) -> None:
        first = slab * self.blocks_per_slab
        self.free[slab] = list(range(first + self.blocks_per_slab - 1, first - 1, -1))
        self.free_blocks += self.blocks_per_slab
        heapq.heappush(self._fullest, (self.blocks_per_slab, -slab))

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks; the caller has checked that they are free."""
        blocks: list[int] = []
        while len(blocks) < count:
            free_blocks, negative = heapq.heappop(self._fullest)
            free = self.free.get(-negative)
            if not free or len(free) != free_blocks:
                continue
            keep = max(free_blocks - (count - len(blocks)), 0)
            blocks += reversed(free[keep:])
            del free[keep:]
            if keep:
                heapq.heappush(self._fullest, (keep, negative))
        self.free_blocks -= count
        self.held.update(blocks)
        return blocks

    @property
    def clearable(self) -> list[int]:
        """The slabs without held blocks: free as soon as their idle blocks are dropped and transfers have ended."""
        n = self.blocks_per_slab
        return [slab for slab, count in self.clearing.items() if count + len(self.free[slab]) == n]

    def clear(self, blocks: Iterable[int], change: int) -> None:
        """Record that blocks become idle or moving (`change` 1), or are so no more (-1)."""
        for block in blocks:
            slab = block // self.blocks_per_slab
            count = self.clearing.get(slab, 0) + change
            if count:
                self.clearing[slab] = count
            else:
                del self.clearing[slab]

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Free blocks. Returns the slabs that are empty now, which the pool gives up."""
        touched: set[int] = set()
        for block in blocks:
            slab = block // self.blocks_per_slab
            self.free[slab].append(block)
            self.free_blocks += 1
            touched.add(slab)
        empty = [slab for slab in touched if len(self.free[slab]) == self.blocks_per_slab]
        for slab in empty:
            del self.free[slab]
            self.free_blocks -= self.blocks_per_slab
        for slab in touched.difference(empty):
            heapq.heappush(self._fullest, (len(self.free[slab]), -slab))
        return empty

    def check(self, moving: Sequence[int]) -> None:
        free = [block for blocks in self.free.values() for block in blocks]
        n = self.blocks_per_slab
        every = [block for slab in self.free for block in range(slab * n, slab * n + n)]
        assert sorted([*free, *self.held, *self.idle, *moving]) == sorted(every), "lost or doubled blocks"
        clearing = Counter(block // n for block in (*self.idle, *moving))
        assert clearing == self.clearing, f"idle or moving blocks by slab: {clearing}, counted {self.clearing}"
        assert len(free) == self.free_blocks, f"{len(free)} blocks are free, {self.free_blocks} counted"
        assert all(block // n == slab for slab, blocks in self.free.items() for block in blocks), (
            "a block is listed under another slab"
        )
        assert all(len(blocks) < n for blocks in self.free.values()), "an empty slab was kept"
        found = set(self._fullest)
        assert all((len(blocks), -slab) in found for slab, blocks in self.free.items() if blocks), (
            "a slab with free blocks is not queued"
        )


class KvCache:
    """An allocator of blocks of any shapes: each is free, held, idle, or moving. It allocates slabs as needed."""

    def __init__(self, slabs: SlabSource, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._slabs = slabs
        self._pools: dict[KvShape, _Pool] = {}
        self._moves: MoveList[tuple[KvShape, tuple[int, ...]]] = MoveList()

    def blocks_per_slab(self, shape: KvShape) -> int:
        """How many blocks of the shape fit a slab. Raises ValueError if none does."""
        blocks = self.slab_bytes // shape.block_bytes
        if not blocks:
            raise ValueError(f"a block of {shape.block_bytes} bytes exceeds slab_bytes {self.slab_bytes}: {shape}")
        return blocks

    def free_blocks(self, shape: KvShape) -> int:
        """Blocks that can be allocated without another slab."""
        pool = self._pools.get(shape)
        return pool.free_blocks if pool else 0

    def allocate(self, shape: KvShape, count: int) -> list[int]:
        """Allocate `count` blocks, all or none.

        Raises:
            OutOfBlocksError: too few are free, with the free slabs counted in.
            ValueError: a block of this shape exceeds a slab.
        """
        assert count >= 0, count
        pool = self._pools.get(shape)
        if pool is None:
            pool = self._pools[shape] = _Pool(self.blocks_per_slab(shape))
        missing_blocks = count - pool.free_blocks
        slabs: list[int] = []
        while missing_blocks > 0:
            slab = self._slabs.take_kv()
            if slab is None:
                for taken in slabs:
                    self._slabs.free_kv(taken)
                raise OutOfBlocksError(count, missing_blocks)
            slabs.append(slab)
            missing_blocks -= pool.blocks_per_slab
        for slab in slabs:
            pool.add_slab(slab)
        return pool.take(count)

    def free(self, shape: KvShape, blocks: Sequence[int], after: Event = PASSED) -> None:
        """Free blocks, all or none. They can be allocated again as soon as `after` is done.

        Raises:
            ValueError: one of them is not held, or is listed twice.
        """
        pool = self._held(shape, blocks)
        pool.held.difference_update(blocks)
        if after.done():
            self._release(shape, blocks)
        else:
            pool.clear(blocks, 1)
            self._moves.add((shape, tuple(blocks)), after)

    def park(self, shape: KvShape, blocks: Sequence[int]) -> None:
        """Make held blocks idle: they keep their contents.

        Raises:
            ValueError: one of them is not held, or is listed twice.
        """
        pool = self._held(shape, blocks)
        pool.held.difference_update(blocks)
        pool.idle.update(blocks)
        pool.clear(blocks, 1)

    def hold(self, shape: KvShape, block: int) -> None:
        """Make an idle block a held one. Raises KeyError if it is not idle."""
        pool = self._pools[shape]
        pool.idle.remove(block)
        pool.held.add(block)
        pool.clear((block,), -1)

    def free_bytes(self) -> int:
        """Bytes of blocks that can be allocated without another slab, of all shapes."""
        return sum(pool.free_blocks * shape.block_bytes for shape, pool in self._pools.items())

    def idle_blocks(self, shape: KvShape) -> int:
        pool = self._pools.get(shape)
        return len(pool.idle) if pool else 0

    def moving_blocks(self, shape: KvShape) -> int:
        return sum(len(blocks) for moving, blocks in self._moves if moving == shape)

    def clearable_slabs(self, *, other_than: KvShape | None = None) -> list[int]:
        """The slabs without held blocks, of all shapes or all but one. They are free as soon as their idle blocks are
        freed and the transfers that use them have ended.
        """
        return [slab for shape, pool in self._pools.items() if shape != other_than for slab in pool.clearable]

    def held_blocks(self) -> dict[KvShape, frozenset[int]]:
        """The held blocks of each shape that has some."""
        return {shape: frozenset(pool.held) for shape, pool in self._pools.items() if pool.held}

    def settle(self) -> None:
        """Free the blocks whose transfers are done."""
        for shape, blocks in self._moves.take_done():
            self._pools[shape].clear(blocks, -1)
            self._release(shape, blocks)

    def usage(self) -> dict[KvShape, ShapeUsage]:
        """The memory of each shape ever used."""
        moving = {shape: self.moving_blocks(shape) for shape in self._pools}
        return {
            shape: ShapeUsage(
                used_bytes=(len(pool.held) + moving[shape]) * shape.block_bytes,
                held_bytes=len(pool.free) * self.slab_bytes,
                moving_bytes=moving[shape] * shape.block_bytes,
                idle_bytes=len(pool.idle) * shape.block_bytes,
            )
            for shape, pool in self._pools.items()
        }

    def check(self) -> None:
        """Assert that each block is in exactly one state and that no slab serves two shapes."""
        slabs = [slab for pool in self._pools.values() for slab in pool.free]
        assert len(set(slabs)) == len(slabs), "a slab serves two shapes"
        for shape, pool in self._pools.items():
            pool.check([block for moving, blocks in self._moves if moving == shape for block in blocks])

    def _held(self, shape: KvShape, blocks: Sequence[int]) -> _Pool:
        pool = self._pools.get(shape)
        if pool is None or len(set(blocks)) != len(blocks) or not pool.held.issuperset(blocks):
            raise ValueError(f"blocks {blocks} of {shape} are not all held, each once")
        return pool

    def _release(self, shape: KvShape, blocks: Sequence[int]) -> None:
        for slab in self._pools[shape].release(blocks):
            self._slabs.free_kv(slab)
