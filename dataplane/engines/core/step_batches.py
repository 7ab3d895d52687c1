"""What one step runs together: as many of a turn's sequences as there is room for, and of each how many tokens."""

from collections.abc import Sequence
from typing import Generic

from dataplane.engines.core.kv import KvLocation, KvMemory, KvT
from dataplane.engines.core.room import Room
from dataplane.engines.core.sequences import Chunk, TokenSequence
from dataplane.engines.core.served_models import ServedModel


class StepBatches(Generic[KvT]):
    """Makes step batches of at most `batch_max` decoding sequences, or `prefill_tokens_max` tokens to prefill."""

    def __init__(self, room: Room[KvT], kv: KvMemory[KvT], *, batch_max: int, prefill_tokens_max: int) -> None:
        self._room = room
        self._kv = kv
        self._batch_max = batch_max
        self._prefill_tokens_max = prefill_tokens_max

    def prefill(self, group: Sequence[TokenSequence[KvT]], model: ServedModel[KvT]) -> list[Chunk[KvT]]:
        """The next tokens of a group of a model's sequences, in order. While the group finds no room, those of the
        model that hold theirs already go on: the first of the group may be waiting for them.
        """
        return self._prefill(group) or self._prefill(model.half_prefilled)

    def _prefill(self, sequences: Sequence[TokenSequence[KvT]]) -> list[Chunk[KvT]]:
        """As many, in order, as one step takes; the last one perhaps in part."""
        chunks: list[Chunk[KvT]] = []
        tokens = self._prefill_tokens_max
        for sequence in sequences:
            keep = [chunk.sequence for chunk in chunks]
            if tokens <= 0 or not self._room.grow(sequence, len(sequence.tokens) + 1, keep):
                break
            chunks.append(Chunk(sequence=sequence, count=min(tokens, sequence.pending)))
            tokens -= chunks[-1].count
        return chunks

    def decode(self, model: ServedModel[KvT]) -> list[Chunk[KvT]]:
        """One token of each sequence whose KV is there. KV that is away is sent for, in order, while there is room:
        the first may drive others out for it, and nobody takes what is being made free for one before it.
        """
        ready: list[TokenSequence[KvT]] = []
        before, blocked = 0, False
        for sequence in model.decoding[: self._batch_max]:
            if sequence.kv.location is KvLocation.HOST and not blocked:
                fits = before == 0 or self._kv.fits(sequence.kv, spare=before)
                blocked = not (fits and self._room.bring(sequence, ready))
            if sequence.kv.location is KvLocation.DEVICE and self._room.grow(sequence, len(sequence.tokens), ready):
                ready.append(sequence)
            before += sequence.kv.location in (KvLocation.DEVICE, KvLocation.SWAPPING_IN)
        return [Chunk(sequence=sequence, count=1) for sequence in ready]
