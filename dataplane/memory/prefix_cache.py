"""Cached prefixes in one memory: which blocks of a `KvCache` hold the KV of which keys. Bookkeeping only; no tensors.

A cached block has as many references as sequences, or transfers, use it. Without any it is idle: it counts as free
memory, and is evicted when that runs short, the block that was used the longest ago first. A sequence gives up its last
block first, so that a prefix loses its end before its beginning.

Blocks of several shapes share slabs (see `kv_cache`). For a shape, an idle block of its own is worth one block; blocks
of other shapes are evicted only with a whole slab, in which nothing is held.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, merge
from operator import attrgetter

from dataplane.memory.events import PASSED, AllOf, Event
from dataplane.memory.kv_cache import KvCache, KvShape

_USED = attrgetter("used")


@dataclass(eq=False, kw_only=True, slots=True)
class CachedBlock:
    """A block that holds the KV of `key`, of a model (`owner`). `arrival`: its contents are right once that is done
    without an error. `busy`: a transfer that still uses its memory. `used`: when it was last given up, by a counter.
    """

    key: bytes
    owner: str
    shape: KvShape
    block: int
    refs: int = 1
    arrival: Event = PASSED
    busy: Event = PASSED
    used: int = 0

    @property
    def free_after(self) -> Event:
        events = [event for event in (self.arrival, self.busy) if not event.done()]
        return AllOf(events) if events else PASSED

    def in_use_until(self, event: Event) -> None:
        """Its memory is not free before the event, whatever else uses it."""
        if not event.done():
            self.busy = event if self.busy.done() else AllOf((self.busy, event))


class PrefixCache:
    """The cached blocks of one memory. The blocks are those of `cache`, which other owners use too."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._entries: dict[bytes, CachedBlock] = {}
        self._blocks: dict[KvShape, dict[int, CachedBlock]] = {}
        self._idle: dict[KvShape, dict[int, CachedBlock]] = {}
        """By shape and block, the least recently used first."""
        self._slabs: dict[int, dict[int, CachedBlock]] = {}
        """The same by slab and block."""
        self._clock = 0

    def __len__(self) -> int:
        """How many keys can be found."""
        return len(self._entries)

    def find(self, key: bytes) -> CachedBlock | None:
        return self._entries.get(key)

    def add(self, key: bytes, owner: str, shape: KvShape, block: int, *, arrival: Event = PASSED) -> CachedBlock | None:
        """Cache a held block, whose holder has its first reference. None if the key is cached already, or the block is:
        then it remains what it was.
        """
        blocks = self._blocks.setdefault(shape, {})
        if key in self._entries or block in blocks:
            return None
        entry = CachedBlock(key=key, owner=owner, shape=shape, block=block, arrival=arrival)
        self._entries[key] = blocks[block] = entry
        return entry

    def take(self, entry: CachedBlock) -> None:
        """Add a reference."""
        if entry.refs == 0:
            del self._idle[entry.shape][entry.block]
            slab = self._slab_of(entry)
            del self._slabs[slab][entry.block]
            if not self._slabs[slab]:
                del self._slabs[slab]
            self._cache.hold(entry.shape, entry.block)
        entry.refs += 1

    def release(self, shape: KvShape, blocks: Sequence[int], after: Event = PASSED) -> None:
        """Give up blocks of a sequence, in its order: cached ones lose a reference, others are freed. A transfer may
        use them until `after` is done.
        """
        cached = self._blocks.get(shape, {})
        own = [block for block in blocks if block not in cached]
        if own:
            self._cache.free(shape, own, after=after)
        for block in reversed(blocks):
            if block in cached:
                cached[block].in_use_until(after)
                self._give_up(cached[block])

    def evict(self, entry: CachedBlock) -> None:
        """Forget the key of a block. Its memory is free once it has no references and no transfer uses it. Harmless for
        one that was evicted before.
        """
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        if entry.refs == 0:
            self.take(entry)
            self._give_up(entry)

    def coldest(self, shape: KvShape, blocks: int) -> list[CachedBlock]:
        """The idle blocks to evict so that so many blocks of a shape can be allocated; all there are, if too few."""
        mine = iter(self._idle.get(shape, {}).values())
        slabs = self._clearable(shape)
        per_slab = self._cache.blocks_per_slab(shape)
        chosen: list[CachedBlock] = []
        entry = next(mine, None)
        while blocks > 0 and (entry is not None or slabs):
            if entry is not None and (not slabs or entry.used <= slabs[0][0]):
                chosen.append(entry)
                entry = next(mine, None)
                blocks -= 1
            else:
                chosen += heappop(slabs)[2]
                blocks -= per_slab
        return chosen

    def oldest(self, size_bytes: int) -> list[CachedBlock]:
        """The idle blocks of so many bytes that were used the longest ago, of all shapes; all there are, if too few."""
        chosen: list[CachedBlock] = []
        for entry in merge(*(idle.values() for idle in self._idle.values()), key=_USED):
            if size_bytes <= 0:
                break
            chosen.append(entry)
            size_bytes -= entry.shape.block_bytes
        return chosen

    def within(self, slabs: Iterable[int]) -> list[CachedBlock]:
        """The idle blocks in some slabs."""
        return [entry for slab in slabs for entry in self._slabs.get(slab, {}).values()]

    def forget(self, owner: str) -> None:
        """Evict all blocks of a model."""
        for entry in [entry for entry in self._entries.values() if entry.owner == owner]:
            self.evict(entry)

    def allocatable_blocks(self, shape: KvShape) -> int:
        """How many blocks of a shape could be allocated if all idle blocks were evicted, free ones not counted."""
        others = len(self._clearable(shape))
        return self._cache.idle_blocks(shape) + others * self._cache.blocks_per_slab(shape)

    def leaving_blocks(self, shape: KvShape) -> int:
        """How many more blocks of a shape can be allocated once the transfers of freed blocks have ended."""
        others = self._cache.clearable_slabs(other_than=shape)
        emptying = sum(slab not in self._slabs for slab in others)
        return self._cache.moving_blocks(shape) + emptying * self._cache.blocks_per_slab(shape)

    def check(self, references: Iterable[tuple[KvShape, int]]) -> None:
        """Assert that the held blocks are those in `references`, one for each user, of which only cached ones have
        several; and that idle blocks are found.
        """
        counted = Counter(references)
        held = {(shape, block) for shape, blocks in self._cache.held_blocks().items() for block in blocks}
        assert held == counted.keys(), f"held: {held}, used: {counted}"
        shared = [(shape, block) for (shape, block), users in counted.items() if users > 1]
        assert all(block in self._blocks.get(shape, {}) for shape, block in shared), "two sequences write to a block"
        cached = [entry for blocks in self._blocks.values() for entry in blocks.values()]
        for entry in cached:
            users = counted[entry.shape, entry.block]
            assert entry.refs == users, f"block {entry.block} has {entry.refs} references, {users} users"
            idle = self._idle.get(entry.shape, {})
            assert (entry.block in idle) == (entry.refs == 0), f"block {entry.block} is idle, or not, without reason"
        assert all(self._blocks[e.shape].get(e.block) is e for e in self._entries.values()), "a key has no block"
        for shape, idle in self._idle.items():
            assert len(idle) == self._cache.idle_blocks(shape), "an idle block is not cached"
            assert all(self._slabs[self._slab_of(entry)][block] is entry for block, entry in idle.items()), "no slab"
            ages = [entry.used for entry in idle.values()]
            assert ages == sorted(ages), "idle blocks are out of order"

    def _give_up(self, entry: CachedBlock) -> None:
        entry.refs -= 1
        if entry.refs:
            return
        shape, block = entry.shape, entry.block
        if self._entries.get(entry.key) is not entry:
            del self._blocks[shape][block]
            self._cache.free(shape, (block,), after=entry.free_after)
            return
        self._clock += 1
        entry.used = self._clock
        self._idle.setdefault(shape, {})[block] = entry
        self._slabs.setdefault(self._slab_of(entry), {})[block] = entry
        self._cache.park(shape, (block,))

    def _slab_of(self, entry: CachedBlock) -> int:
        return entry.block // self._cache.blocks_per_slab(entry.shape)

    def _clearable(self, shape: KvShape) -> list[tuple[int, int, list[CachedBlock]]]:
        """A heap of the slabs of other shapes that hold nothing but idle blocks: (last use, slab, its blocks)."""
        clearable = self._cache.clearable_slabs(other_than=shape)
        slabs = [(slab, list(self._slabs[slab].values())) for slab in clearable if slab in self._slabs]
        heap = [(entries[-1].used, slab, entries) for slab, entries in slabs]
        heapify(heap)
        return heap
