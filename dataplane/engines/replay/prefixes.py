"""The prefix cache of a replayed slot: which blocks of prompts are cached, counted and without contents.

A block is named by a hash of its tokens and all before it. Blocks in use stay; idle ones are evicted least recently
used first, a prefix's end before its beginning: to host memory, and dropped when that is full.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile


class CachedBlocks:
    """Blocks of one size. `host_blocks`: how many fit into host memory."""

    def __init__(self, host_blocks: int) -> None:
        self._host_blocks = host_blocks
        self._users: dict[Hashable, int] = {}
        """How many sequences use a block."""
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._host: OrderedDict[Hashable, None] = OrderedDict()
        """The least recently used first."""

    @property
    def idle(self) -> int:
        """Blocks on the device that nobody uses."""
        return len(self._idle)

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
            self._idle.pop(block, None)
            self._host.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1

    def release(self, blocks: Sequence[Hashable]) -> None:
        """A sequence no longer uses its blocks, which are in its order."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None

    def evict(self, keep: int) -> None:
        """Keep at most so many idle blocks on the device."""
        while len(self._idle) > max(keep, 0):
            block, _ = self._idle.popitem(last=False)
            self._host[block] = None
            if len(self._host) > self._host_blocks:
                self._host.popitem(last=False)

    def _has(self, block: Hashable) -> bool:
        return block in self._users or block in self._idle or block in self._host
