"""The prefix cache of a replayed slot: which blocks of prompts are cached, counted and without contents.

A block is named by a hash of its tokens and all before it. Blocks in use stay; idle ones are evicted least recently
used first, a prefix's end before its beginning: to host memory, and dropped when that is full.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile


class CachedBlocks:
    """Blocks with their sizes, in any one unit. `idle_size`: of those on the device that nobody uses."""

    def __init__(self) -> None:
        self.idle_size = 0
        self._host_size = 0
        self._users: dict[Hashable, int] = {}
        """How many sequences use a block."""
        self._idle: OrderedDict[Hashable, int] = OrderedDict()
        self._host: OrderedDict[Hashable, int] = OrderedDict()
        """By block its size, the least recently used first."""

    def find(self, blocks: Sequence[Hashable]) -> int:
        """How many of the first blocks are cached, on the device or in host memory."""
        return sum(1 for _ in takewhile(self._has, blocks))

    def take(self, blocks: Sequence[Hashable]) -> tuple[int, int]:
        """Use the first blocks that are cached: how many, and how many of them are loaded from host memory."""
        count = self.find(blocks)
        loaded = sum(block in self._host for block in blocks[:count])
        self.add(blocks[:count])
        return count, loaded

    def add(self, blocks: Sequence[Hashable]) -> None:
        """Cache blocks on the device for a sequence that uses them."""
        for block in blocks:
            self.idle_size -= self._idle.pop(block, 0)
            self._host_size -= self._host.pop(block, 0)
            self._users[block] = self._users.get(block, 0) + 1

    def release(self, blocks: Sequence[Hashable], size: int = 1) -> None:
        """A sequence no longer uses its blocks, which are in its order, each of this size."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = size
                self.idle_size += size

    def evict(self, keep: int, host: int) -> None:
        """Keep at most so much of what is idle on the device, and so much in host memory."""
        while self._idle and self.idle_size > keep:
            block, size = self._idle.popitem(last=False)
            self.idle_size -= size
            self._host[block] = size
            self._host_size += size
        while self._host and self._host_size > host:
            self._host_size -= self._host.popitem(last=False)[1]

    def _has(self, block: Hashable) -> bool:
        return block in self._users or block in self._idle or block in self._host
