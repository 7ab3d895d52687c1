"""One step of a turn: weights, KV, a forward pass, tokens."""

from collections.abc import Callable, Collection, Sequence

import torch

from dataplane.engines.preemption import Place
from dataplane.engines.torch.kv import KvStore
from dataplane.engines.torch.pooled import Pooled
from dataplane.engines.torch.room import Room
from dataplane.engines.torch.runner import run_chunks
from dataplane.engines.torch.sampler import Draw, choose_tokens
from dataplane.engines.torch.sequences import Chunk, TokenSequence
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.torch.weights import WeightStore
from dataplane.memory.events import TransferError
from dataplane.turns.schedule import Turn


class ModelFailedError(Exception):
    """A model's forward pass raised; the message says what."""


Made = list[tuple[TokenSequence, int | None]]
"""Sequences and their new tokens; None where the logits are not numbers."""

Watch = Callable[[TokenSequence, torch.Tensor], None]
"""Told of each sequence that is about to get a token, and of the logits `[vocabulary]` it is chosen from."""


class Steps:
    """Runs steps. One that cannot run waits for what is on its way, if anything is."""

    def __init__(
        self,
        settings: TorchEngineSettings,
        weights: WeightStore,
        kv: KvStore,
        room: Room,
        clock: Callable[[], float],
        watch: Watch | None = None,
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._kv = kv
        self._room = room
        self._clock = clock
        self._watch = watch

    def run(
        self, turn: Turn, pooled: Pooled, group: Sequence[TokenSequence], models: Collection[Pooled]
    ) -> Made | None:
        """Run a step of the turn; None if it could not run. `group`: what to prefill, in order, in a prefill turn.

        Raises:
            TransferError: weights failed to arrive.
            ModelFailedError: the model's code raised something.
        """
        if not self._weights.bring(pooled.model, self._clock()):
            self._weights.await_one()
            return None
        if not self._settings.layerwise:
            self._weights.await_all(pooled.model)
        whole = pooled.name in self._weights.resident_models
        chunks = self._prefill_chunks(group, models) if turn.kind == "prefill" else self._decode_chunks(pooled, models)
        if not chunks or not self._weights.holds(pooled.model):  # its own weights may have made way for its KV
            self._kv.await_one()
            return None
        tokens = sum(chunk.count for chunk in chunks)
        squared = sum(chunk.end**2 - chunk.sequence.cached**2 for chunk in chunks)
        context = sum(chunk.sequence.cached for chunk in chunks)
        began_s = self._clock()
        try:
            made = self._forward(pooled, chunks)
        except (TransferError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise ModelFailedError(f"{type(error).__name__}: {error}") from error
        took_s = self._clock() - began_s
        if whole and turn.kind == "prefill":
            pooled.estimate = pooled.estimate.observe_prefill(took_s, tokens, squared)
        elif whole:
            pooled.estimate = pooled.estimate.observe_decode(took_s, context, len(chunks))
        return made

    def _prefill_chunks(self, group: Sequence[TokenSequence], models: Collection[Pooled]) -> list[Chunk]:
        """As many of the group, in order, as one step takes; the last one perhaps in part."""
        chunks: list[Chunk] = []
        room = self._settings.prefill_tokens_per_step_max
        for sequence in group:
            keep = [chunk.sequence for chunk in chunks]
            if room <= 0 or not self._room.grow(sequence, len(sequence.tokens) + 1, models, keep):
                break
            chunks.append(Chunk(sequence=sequence, count=min(room, sequence.pending)))
            room -= chunks[-1].count
        return chunks

    def _decode_chunks(self, pooled: Pooled, models: Collection[Pooled]) -> list[Chunk]:
        """One token of each sequence whose KV is there. KV that is away is sent for, in order, while there is room:
        the first may drive others out for it, and nobody takes what is being made free for one before it.
        """
        ready: list[TokenSequence] = []
        before, blocked = 0, False
        for sequence in pooled.decoding()[: self._settings.batch_max]:
            if sequence.kv.place is Place.AWAY and not blocked:
                fits = before == 0 or self._kv.fits(sequence.kv, spare=before)
                blocked = not (fits and self._room.bring(sequence, models, ready))
            if sequence.kv.place is Place.HERE and self._room.grow(sequence, len(sequence.tokens), models, ready):
                ready.append(sequence)
            before += sequence.kv.place in (Place.HERE, Place.ARRIVING)
        return [Chunk(sequence=sequence, count=1) for sequence in ready]

    def _forward(self, pooled: Pooled, chunks: list[Chunk]) -> Made:
        skeleton = pooled.model.skeleton
        logits = run_chunks(skeleton, self._kv.view(pooled.shape, skeleton.dtype), chunks)
        for chunk in chunks:
            if chunk.sequence not in pooled.sequences:
                pooled.sequences.append(chunk.sequence)
        makers = [index for index, chunk in enumerate(chunks) if chunk.makes_token]
        if self._watch is not None:
            for index in makers:
                self._watch(chunks[index].sequence, logits[index])
        draws = [_draw(chunks[index].sequence, skeleton.eos_ids) for index in makers]
        tokens = choose_tokens(logits[makers], draws) if makers else []
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
        return [(chunks[index].sequence, token) for index, token in zip(makers, tokens, strict=True)]


def _draw(sequence: TokenSequence, eos_ids: frozenset[int]) -> Draw:
    request = sequence.request
    return Draw(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        position=len(sequence.tokens),
        banned=tuple(sorted(eos_ids)) if request.ignore_eos else (),
    )
