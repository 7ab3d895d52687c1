"""One step of a turn: weights, KV, a forward pass, tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dataplane.engines.core.masks import prepare_masks
from dataplane.engines.core.sampler import SequenceDraws, on_host, sample_tokens
from dataplane.engines.core.scores import token_scores
from dataplane.engines.core.step_batches import StepBatches, work_of
from dataplane.engines.core.uploads import upload
from dataplane.engines.interface import TokenScore
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.models import TorchModel
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.engines.torch.model.batch_kv import BatchKv
from dataplane.engines.torch.model.graphs import DecodeGraphs
from dataplane.engines.torch.model.inputs import next_inputs
from dataplane.engines.torch.model.pooling import Pooler
from dataplane.engines.torch.model.prepared import PreparedStep, next_rows
from dataplane.engines.torch.model.runner import prepare_logits, run_chunks
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.sequences import Chunk, TokenSequence
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import TransferError
from dataplane.protocol.errors import DeviceLostError
from dataplane.scheduling.schedule import Turn


class ModelFailedError(Exception):
    """A model's forward pass raised; the message says what."""


Sampled = list[tuple[TokenSequence, int | None, TokenScore | None]]
"""Sequences, their new tokens (None where the logits, or the values of a pooled answer, are not numbers), and the
scores of those that want them.
"""

POOLED = -1
"""In place of the token of a sequence whose values were pooled."""

Watch = Callable[[TokenSequence, torch.Tensor], None]
"""Called with each sequence that is about to get a token, and the logits `[vocabulary]` it is sampled from, which
sampling changes afterwards.
"""


class Steps:
    """Runs steps. A step that cannot run waits for a transfer, if one is under way. `evict_kv` evicts KV from slabs
    that a model needs to be loaded. `graphs`: run decode steps where they can.
    """

    def __init__(
        self,
        settings: TorchEngineSettings,
        weights: WeightStore,
        kv: KvStore,
        step_batches: StepBatches[SequenceKv],
        clock: Callable[[], float],
        watch: Watch | None = None,
        *,
        evict_kv: Callable[[TorchModel], None],
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._kv = kv
        self._step_batches = step_batches
        self._clock = clock
        self._watch = watch
        self._evict_kv_for = evict_kv
        self._draws: SequenceDraws[SequenceKv] = SequenceDraws()
        self._graphs = graphs
        self._batch_kv = BatchKv() if settings.device == "cpu" and settings.ranks == 1 else None
        self._prepared: PreparedStep | None = None
        """The step that is likely to be the next one."""

    def run(self, turn: Turn, model: TorchModel, group: Sequence[TokenSequence]) -> Sampled | None:
        """Run a step of the turn; None if it could not run. `group`: the prompts of the turn, in order.

        Raises:
            TransferError: a transfer of weights failed.
            ModelFailedError: the model's code raised an exception.
            DeviceLostError: so it did on a slot of several ranks, or one of them is gone.
        """
        if not self._weights.load(model.weights, self._clock()):
            self._evict_kv_for(model)
            self._weights.await_one()
            return None
        if not self._settings.layerwise:
            self._weights.await_all(model.weights)
        chunks = self._step_batches.form(turn, model, group)
        if not chunks or not self._weights.holds(model.weights):  # its KV may have evicted its own weights
            self._kv.await_one()
            return None
        whole = model.name in self._weights.resident_models  # its layers may have been offloaded for this step
        work = work_of(chunks)
        captures = self._captures
        began_s = self._clock()
        try:
            made = self._forward(model, chunks)
        except (TransferError, torch.AcceleratorError, DeviceLostError):
            raise
        except Exception as error:
            raise ModelFailedError(f"{type(error).__name__}: {error}") from error
        took_s = self._clock() - began_s
        self._weights.ran(model.weights)
        if whole and captures == self._captures:
            model.observe_step(took_s, work)
        return made

    def forget(self, skeleton: Skeleton) -> None:
        """Free what was captured, prepared or copied of a model that is forgotten."""
        self._prepared = None
        if self._batch_kv is not None:
            self._batch_kv = BatchKv()
        if self._graphs is not None:
            self._graphs.forget(skeleton)

    def _forward(self, model: TorchModel, chunks: list[Chunk]) -> Sampled:
        skeleton, pooler = model.weights.skeleton, model.weights.pooler
        prepared, self._prepared = self._prepared, None
        if pooler is not None:
            return self._pool(pooler, model, chunks)
        makers = [index for index, chunk in enumerate(chunks) if chunk.makes_token]
        prepare_masks(chunks[index].sequence for index in makers)  # while the model runs
        cache = self._kv.view(model.shape, skeleton.dtype)
        logits = None if prepared is None else prepared.run(chunks)
        if logits is None:
            logits = self._logits(skeleton, cache, chunks)
        if self._watch is not None:
            for index in makers:
                self._watch(chunks[index].sequence, logits[index])
        eos_ids = tuple(sorted(skeleton.eos_ids))
        sequences = [chunks[index].sequence for index in makers]
        draws = [self._draws.next(sequence, eos_ids) for sequence in sequences]
        logits = _rows(logits, makers)
        scored = [at for at, sequence in enumerate(sequences) if sequence.request.logprobs is not None]
        unchanged = _rows(logits, scored).clone() if scored else logits
        chosen = sample_tokens(logits, draws) if makers else None
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
        if chosen is not None:
            self._prepared = self._prepare(skeleton, cache, chunks, chosen)
        tokens = [] if chosen is None else on_host(chosen)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is not None:  # keys and values that are not numbers must not reach others
                self._kv.computed(sequence.kv, sequence.cached)
        scores = _scores(unchanged, scored, sequences, tokens)
        return [(sequence, tokens[at], scores.get(at)) for at, sequence in enumerate(sequences)]

    def _prepare(
        self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk], tokens: torch.Tensor
    ) -> PreparedStep | None:
        """Prepare the step after this one while it runs, if its batch may go on: all of it decodes, and none makes its
        last token. `tokens`: what it makes. A block that is allocated here stays with its sequence in any case.
        """
        sequences = [chunk.sequence for chunk in chunks]
        if skeleton.mirror is not None or not all(map(_goes_on, sequences)):
            return None
        if not all(self._kv.reserve(sequence.kv, sequence.cached + 1) for sequence in sequences):
            return None
        inputs = next_inputs(sequences, cache.shape[4])
        launch: Callable[[], torch.Tensor | None] | None
        if self._graphs is not None and self._graphs.may_run(skeleton, chunks):
            launch = self._graphs.prepare(skeleton, cache, inputs, tokens)
        else:
            lists = [sequence.kv.blocks for sequence in sequences]
            launch = prepare_logits(skeleton, cache, inputs, tokens, self._batch_kv, lists)
        return None if launch is None else PreparedStep(rows=next_rows(sequences), launch=launch)

    @property
    def _captures(self) -> int:
        return 0 if self._graphs is None else self._graphs.captures

    def _logits(self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = None if self._graphs is None else self._graphs.run(skeleton, cache, chunks)
        return run_chunks(skeleton, cache, chunks, self._batch_kv) if logits is None else logits

    def _pool(self, pooler: Pooler, model: TorchModel, chunks: list[Chunk]) -> Sampled:
        skeleton = model.weights.skeleton
        pooled = pooler.run(skeleton, self._kv.view(model.shape, skeleton.dtype), chunks)
        for index, values in pooled.items():
            chunks[index].sequence.values = values
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
        return [(chunks[index].sequence, POOLED if values else None, None) for index, values in pooled.items()]


def _goes_on(sequence: TokenSequence) -> bool:
    """Whether it decodes, and the token that is being made is not its last for certain."""
    return sequence.prefilled and sequence.generated + 1 < sequence.request.max_tokens


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Those rows of `[n, vocabulary]`, in order; not a copy if they are all of them."""
    if len(rows) == len(logits):
        return logits
    (there,) = upload(logits.device, np.array(rows, dtype=np.int64))
    return logits[there]


def _scores(
    logits: torch.Tensor, scored: Sequence[int], sequences: Sequence[TokenSequence], tokens: Sequence[int | None]
) -> dict[int, TokenScore]:
    """The scores of new tokens, by their number; `logits` has a row of the model's own for each that is `scored`."""
    tops = [sequences[at].request.logprobs or 0 for at in scored]
    chosen = [tokens[at] for at in scored]
    scores = token_scores(logits, [token or 0 for token in chosen], tops)
    return {at: score for at, score, token in zip(scored, scores, chosen, strict=True) if token is not None}
