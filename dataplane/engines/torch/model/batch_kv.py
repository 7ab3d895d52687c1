"""The KV of the batch that decodes, copied on a CPU as attention reads it, and kept from step to step.

KV is in blocks of the arena; but attention on a CPU reads dense tensors, and to copy all KV of a batch takes up to a
third of a step. So a sequence has a row of one tensor for as long as it decodes: its blocks are copied there once, and
each step writes new keys and values to both.

    row 0     | tokens of a sequence ....... | new | zeros      |
    row 1     | tokens of another ... | new | zeros             |

A batch has the first rows, without gaps: where it has shrunk, the sequence of a last row is copied to a free one. The
blocks in a list never change at positions that were computed, and a sequence whose blocks are others, since it was
swapped or is computed anew, has another list. So a row is the copy of a list object, and of a number of tokens.
"""

from collections.abc import Sequence

import torch

from dataplane.memory.kv_cache import blocks_for

COPIED_BYTES_MAX = 2**28
"""Memory of the copy, as far as rows are used. The KV of a larger batch is copied in each step, layer by layer."""
_GROWTH = 1.25


class BatchKv:
    """The copy of one batch at a time. Called by one thread."""

    def __init__(self, bytes_max: int = COPIED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._kv = self._buffer
        self._cache: torch.Tensor | None = None
        self._held: list[tuple[list[int], int]] = []
        """What the first rows are copies of: blocks, and a number of tokens."""

    def arrange(self, cache: torch.Tensor, lists: Sequence[list[int]], cached: Sequence[int]) -> list[int] | None:
        """The row of each sequence, given its list of blocks and the number of its tokens that have KV in `cache` (see
        `KvStep`). Rows have room for one token more. Those of other sequences are filled. None if they are too large.
        """
        longest = max(cached) + 1
        if not self._has_room(cache, len(lists), longest):
            return None
        known = {(id(blocks), tokens): row for row, (blocks, tokens) in enumerate(self._held[: len(lists)])}
        rows = [known.get((id(blocks), tokens)) for blocks, tokens in zip(lists, cached, strict=True)]
        free = iter(set(range(len(lists))).difference(rows))
        arranged = [next(free) if row is None else row for row in rows]
        held = dict(zip(arranged, zip(lists, cached, strict=True), strict=True))
        for row, before in zip(arranged, rows, strict=True):
            if before is None:
                self._fill(row, cache, *held[row])
        self._held = [held[row] for row in range(len(lists))]
        return arranged

    def rows(self, count: int, tokens: int) -> torch.Tensor:
        """The first rows, up to a number of tokens: `[count, layers, 2, tokens, kv_heads, head_dim]`."""
        return self._kv[:count, :, :, :tokens]

    def written(self) -> None:
        """Each row of the batch was written one token more."""
        self._held = [(blocks, tokens + 1) for blocks, tokens in self._held]

    def _has_room(self, cache: torch.Tensor, count: int, tokens: int) -> bool:
        """Whether there are so many rows of so many tokens. Rows lose their contents where others are made."""
        _, _, layers, _, block_tokens, kv_heads, head_dim = cache.shape
        token_bytes = 2 * layers * kv_heads * head_dim * cache.itemsize
        tokens = blocks_for(tokens, block_tokens) * block_tokens
        if cache is self._cache and count <= self._kv.shape[0] and tokens <= self._kv.shape[3]:
            return True
        most = self._bytes_max // (count * token_bytes)
        if tokens > most:
            return False
        tokens = min(int(tokens * _GROWTH), most)
        rows = self._bytes_max // (tokens * token_bytes)
        if not len(self._buffer):
            self._buffer = torch.empty(self._bytes_max, dtype=torch.uint8)  # takes memory as it is written
        used = self._buffer[: rows * tokens * token_bytes].view(cache.dtype)
        self._kv = used.view(rows, layers, 2, tokens, kv_heads, head_dim)
        self._cache, self._held = cache, []
        return True

    def _fill(self, row: int, cache: torch.Tensor, blocks: Sequence[int], tokens: int) -> None:
        """Copy the KV of so many tokens to a row, which is zero behind it."""
        there, per_slab, block_tokens = self._kv[row], cache.shape[1], cache.shape[4]
        end = blocks_for(tokens, block_tokens)
        for at, block in enumerate(blocks[:end]):
            slab, index = divmod(block, per_slab)
            there[:, :, at * block_tokens : (at + 1) * block_tokens] = cache[slab, index]
        there[:, :, end * block_tokens :] = 0
