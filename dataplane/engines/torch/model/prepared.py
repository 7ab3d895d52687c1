"""The decode step that is likely to follow the present one, prepared while the device runs that.

It reads its tokens where the present step leaves them, on the device, so that nothing is left to make or to upload once
the host has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dataplane.engines.torch.sequences import Chunk, TokenSequence

Row = tuple[TokenSequence, int, int, list[int]]


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A step whose inputs are on the device. `rows`: the chunks that they are of; `launch` runs it, and returns the
    logits as `run_chunks`, or None if it cannot run so any more.
    """

    rows: list[Row]
    launch: Callable[[], torch.Tensor | None]

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """The logits of the step, if it is one of exactly these chunks, and can run."""
        return self.launch() if self.rows == rows_of(chunks) else None


def rows_of(chunks: Sequence[Chunk]) -> list[Row]:
    """All that the inputs of chunks are made of but the tokens: sequence, count, position and blocks. Where one of its
    blocks changes, a sequence has another list of them; those that are added to a list lie behind the position.
    """
    return [(one := chunk.sequence, chunk.count, one.cached, one.kv.blocks) for chunk in chunks]


def next_rows(sequences: Sequence[TokenSequence]) -> list[Row]:
    """`rows_of` the chunks of one token behind those that sequences have cached."""
    return [(one, 1, one.cached, one.kv.blocks) for one in sequences]
