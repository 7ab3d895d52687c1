"""Blocks of a paged KV cache: who holds which. Bookkeeping only; the tensors belong to the engine.

A block holds the keys and values of `block_tokens` consecutive tokens of one sequence, over all layers.
"""


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free. The caller makes room, or waits."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // block_tokens)


class BlockPool:
    """Block numbers `0 .. blocks-1`, each free or held once."""

    def __init__(self, blocks: int) -> None:
        assert blocks >= 0, blocks
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that are held."""
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, all or none.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} of {self.blocks} free")
        blocks = [self._free.pop() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take blocks back, all or none.

        Raises:
            ValueError: one of them is not held, or is named twice.
        """
        if len(set(blocks)) != len(blocks) or not self._held.issuperset(blocks):
            raise ValueError(f"blocks {blocks} are not all held, each once")
        self._held.difference_update(blocks)
        self._free.extend(reversed(blocks))
