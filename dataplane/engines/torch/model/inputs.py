"""The inputs of a forward pass, as plain values that can be sent to other processes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from dataplane.engines.torch.sequences import Chunk, TokenSequence
from dataplane.memory.kv_cache import blocks_for

Wanted = Literal["logits", "states"]
"""What a forward pass is for."""


class ChunkInput(Struct, frozen=True, array_like=True):
    """New tokens of one sequence, the first at position `start`, and the blocks of its KV up to the last of them.
    `adapter`: the name of its LoRA adapter, empty for none.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    adapter: str = ""

    @property
    def count(self) -> int:
        return len(self.tokens)


def chunk_inputs(chunks: Sequence[Chunk], block_tokens: int) -> list[ChunkInput]:
    """The inputs of a step batch, whose KV blocks have `block_tokens` tokens."""
    return [
        ChunkInput(
            tokens=tuple(chunk.sequence.tokens[chunk.sequence.cached : chunk.end]),
            start=chunk.sequence.cached,
            blocks=tuple(chunk.sequence.kv.blocks[: blocks_for(chunk.end, block_tokens)]),
            adapter=chunk.sequence.adapter,
        )
        for chunk in chunks
    ]


def next_inputs(sequences: Sequence[TokenSequence], block_tokens: int) -> list[ChunkInput]:
    """The inputs of a step for the token after those that each sequence has cached, which the host does not know yet: 0
    stands for it. Its block is allocated.
    """
    return [
        ChunkInput(
            tokens=(0,),
            start=sequence.cached,
            blocks=tuple(sequence.kv.blocks[: blocks_for(sequence.cached + 1, block_tokens)]),
            adapter=sequence.adapter,
        )
        for sequence in sequences
    ]


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def row_inputs(chunks: Sequence[ChunkInput], *, per_slab: int, block_tokens: int) -> tuple[Integers, Integers]:
    """The tokens and positions `[2, rows]` of all chunks, one after another, and where their keys and values are
    written: `[3, rows]`, as `KvStep.write`.
    """
    rows = np.array(
        [
            (token, at, chunk.blocks[at // block_tokens], at % block_tokens)
            for chunk in chunks
            for at, token in enumerate(chunk.tokens, chunk.start)
        ]
    ).T
    blocks, offsets = rows[2:]
    return rows[:2], np.stack((blocks // per_slab, blocks % per_slab, offsets))


def block_tables(chunks: Sequence[ChunkInput]) -> Integers:
    """The blocks written so far `[len(chunks), longest]`. Shorter tables are padded with their first block, masked."""
    longest = max(len(chunk.blocks) for chunk in chunks)
    return np.array([[*c.blocks, *c.blocks[:1] * (longest - len(c.blocks))] for c in chunks])
