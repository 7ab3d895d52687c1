"""What one step runs: as many of a turn's sequences as memory allows, and how many tokens of each."""

from collections.abc import Sequence
from typing import Generic

from dataplane.engines.core.kv import DEVICE, HOST, SWAPPING_IN, KvMemory, KvT
from dataplane.engines.core.kv_allocator import KvAllocator
from dataplane.engines.core.sequences import Chunk, TokenSequence
from dataplane.engines.core.served_models import ServedModel


class StepBatches(Generic[KvT]):
    """Forms step batches of at most `batch_max` decoding sequences, or `prefill_tokens_max` tokens to prefill."""

    def __init__(
        self, allocator: KvAllocator[KvT], kv: KvMemory[KvT], *, batch_max: int, prefill_tokens_max: int
    ) -> None:
        self._allocator = allocator
        self._kv = kv
        self._batch_max = batch_max
        self._prefill_tokens_max = prefill_tokens_max

    def prefill(self, group: Sequence[TokenSequence[KvT]], model: ServedModel[KvT]) -> list[Chunk[KvT]]:
        """The next tokens of a group of a model's sequences, in order. If there is no memory for the group, the model's
        partly prefilled sequences, which have theirs, continue: the first of the group may be waiting for them.
        """
        return self._prefill(group) or self._prefill(model.half_prefilled)

    def _prefill(self, sequences: Sequence[TokenSequence[KvT]]) -> list[Chunk[KvT]]:
        """As many sequences, in order, as one step runs; the last one perhaps in part. Passed over are those whose
        cached prefix is being transferred, or computed by another.
        """
        chunks: list[Chunk[KvT]] = []
        tokens = self._prefill_tokens_max
        for sequence in sequences:
            if _is_arriving(sequence) or (not sequence.begun and self._kv.awaits_prefix(sequence.kv)):
                continue
            keep = [chunk.sequence for chunk in chunks]
            if tokens <= 0 or not self._allocator.grow(sequence, sequence.kv_tokens, keep):
                break
            if _is_arriving(sequence):
                continue
            chunks.append(Chunk(sequence=sequence, count=min(tokens, sequence.pending)))
            tokens -= chunks[-1].count
        return chunks

    def decode(self, model: ServedModel[KvT]) -> list[Chunk[KvT]]:
        """One token of each sequence whose KV is on the device. KV in host memory is swapped in, in order, while it
        fits: only the first may preempt others for it, and none takes memory that is being freed for one before it.
        """
        ready: list[TokenSequence[KvT]] = []
        before, blocked = 0, False
        for sequence in model.decoding[: self._batch_max]:
            if sequence.kv.location is HOST and not blocked:
                fits = before == 0 or self._kv.fits(sequence.kv, spare=before)
                blocked = not (fits and self._allocator.swap_in(sequence, ready))
            if sequence.kv.location is DEVICE and self._allocator.grow(sequence, len(sequence.tokens), ready):
                ready.append(sequence)
            before += sequence.kv.location in (DEVICE, SWAPPING_IN)
        return [Chunk(sequence=sequence, count=1) for sequence in ready]


def _is_arriving(sequence: TokenSequence[KvT]) -> bool:
    return sequence.kv.location is SWAPPING_IN
