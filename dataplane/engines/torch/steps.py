"""One step of a turn: weights, KV, a forward pass, tokens."""

from collections.abc import Callable, Sequence

import torch

from dataplane.engines.core.sampler import Draw, choose_tokens
from dataplane.engines.core.step_batches import StepBatches
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.pooled import Pooled
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.engines.torch.model.runner import run_chunks
from dataplane.engines.torch.sequences import Chunk, TokenSequence
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import TransferError
from dataplane.scheduling.schedule import Turn


class ModelFailedError(Exception):
    """A model's forward pass raised; the message says what."""


Sampled = list[tuple[TokenSequence, int | None]]
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
        step_batches: StepBatches[SequenceKv],
        clock: Callable[[], float],
        watch: Watch | None = None,
        *,
        make_way: Callable[[Pooled], None],
    ) -> None:
        """`make_way` has KV leave slabs that a model needs to come in."""
        self._settings = settings
        self._weights = weights
        self._kv = kv
        self._step_batches = step_batches
        self._clock = clock
        self._watch = watch
        self._make_way = make_way

    def run(self, turn: Turn, pooled: Pooled, group: Sequence[TokenSequence]) -> Sampled | None:
        """Run a step of the turn; None if it could not run. `group`: what to prefill, in order, in a prefill turn.

        Raises:
            TransferError: weights failed to arrive.
            ModelFailedError: the model's code raised something.
        """
        if not self._weights.bring(pooled.weights, self._clock()):
            self._make_way(pooled)
            self._weights.await_one()
            return None
        if not self._settings.layerwise:
            self._weights.await_all(pooled.weights)
        batches = self._step_batches
        chunks = batches.prefill(group, pooled) if turn.kind == "prefill" else batches.decode(pooled)
        if not chunks or not self._weights.holds(pooled.weights):  # its own weights may have made way for its KV
            self._kv.await_one()
            return None
        whole = pooled.name in self._weights.resident_models  # it may have lent layers for this very step
        tokens = sum(chunk.count for chunk in chunks)
        squared = sum(chunk.squared_tokens for chunk in chunks)
        context = sum(chunk.sequence.cached for chunk in chunks)
        began_s = self._clock()
        try:
            made = self._forward(pooled, chunks)
        except (TransferError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise ModelFailedError(f"{type(error).__name__}: {error}") from error
        took_s = self._clock() - began_s
        self._weights.ran(pooled.weights)
        if whole and turn.kind == "prefill":
            pooled.observe_prefill(took_s, tokens, squared)
        elif whole:
            pooled.observe_decode(took_s, context, len(chunks))
        return made

    def _forward(self, pooled: Pooled, chunks: list[Chunk]) -> Sampled:
        skeleton = pooled.weights.skeleton
        logits = run_chunks(skeleton, self._kv.view(pooled.shape, skeleton.dtype), chunks)
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
