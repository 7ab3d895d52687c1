"""Decode steps as CUDA graphs: one launch instead of a thousand, which a small step would wait for.

A graph reads weights where they lay when it was captured, so there is one for each place that a model comes to, and for
each size of a batch; smaller batches are padded with copies of their first row, which write what that row writes.
Contexts may be of any length: inputs are copied to where the graph reads them, and no launch depends on their values.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
import torch

from dataplane.engines.core.uploads import upload
from dataplane.engines.torch.model.attention import KvStep, Span
from dataplane.engines.torch.model.inputs import ChunkInput, block_tables, chunk_inputs, row_inputs
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.sequences import Chunk
from dataplane.memory.kv_cache import blocks_for

log = structlog.get_logger()

GRAPHS_KEPT = 64
"""Of a model: those used last."""
_SMALL, _STEP = (1, 2, 4), 8

_Key = tuple[tuple[int, ...], int]


@dataclass(eq=False, kw_only=True)
class _ModelGraphs:
    """The graphs of a model, None for a place and size that was met once, and the inputs of all: `tokens` and
    `positions` `[1, n]`, `write` `[3, n]` and `tables` `[n, b]` as in `KvStep`, for the largest `n` and `b`. They leave
    their results in `logits` `[n, vocabulary]`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    write: torch.Tensor
    tables: torch.Tensor
    logits: torch.Tensor
    known: OrderedDict[_Key, torch.cuda.CUDAGraph | None] = field(default_factory=OrderedDict)


class DecodeGraphs:
    """The graphs of a slot's models, which share the memory of their activations, and that of their logits where they
    have one vocabulary. Called by one thread. `captures`: how many were made.
    """

    def __init__(self, device: torch.device, batch_max: int) -> None:
        self._device = device
        self._batch_max = batch_max
        self._models: dict[Skeleton, _ModelGraphs] = {}
        self._logits: dict[int, torch.Tensor] = {}
        """By the size of the vocabulary."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.captures = 0

    @torch.inference_mode()
    def run(self, skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """As `run_chunks`, for chunks of one token; None if this step has no graph, and is to run without.

        A graph is captured when its place and size are met for the second time. The logits are overwritten by the next
        step.
        """
        if not self.may_run(skeleton, chunks):
            return None
        made = self._models.get(skeleton)
        if made is None:
            made = self._models[skeleton] = self._inputs(skeleton, cache)
        key = self._key(skeleton, len(chunks))
        if key not in made.known:
            made.known[key] = None
            if len(made.known) > GRAPHS_KEPT:
                made.known.popitem(last=False)
            return None
        made.known.move_to_end(key)
        inputs = chunk_inputs(chunks, cache.shape[4])
        if _longest(inputs) > made.tables.shape[1]:
            return None
        skeleton.adapters.select(())  # a graph is captured without those of the step before
        self._fill(made, inputs, cache, key[1])
        graph = made.known[key]
        if graph is None:
            self._capture(skeleton, cache, made, key)
        else:
            graph.replay()
        return made.logits[: len(chunks)]

    def may_run(self, skeleton: Skeleton, chunks: Sequence[Chunk]) -> bool:
        """Whether a step of these chunks is one for a graph, captured or not."""
        return len(chunks) <= self._batch_max and skeleton.can_be_captured and all(map(_is_plain, chunks))

    @torch.inference_mode()
    def prepare(
        self, skeleton: Skeleton, cache: torch.Tensor, inputs: Sequence[ChunkInput], tokens: torch.Tensor
    ) -> Callable[[], torch.Tensor | None] | None:
        """Fill the inputs of a step, with `tokens` `[len(inputs)]`, int64, which are on the device already, and return
        what runs it: `run`'s logits, or None where it has no graph any more. None: it has none yet.
        """
        made, key = self._models.get(skeleton), self._key(skeleton, len(inputs))
        if made is None or made.known.get(key) is None or _longest(inputs) > made.tables.shape[1]:
            return None
        self._fill(made, inputs, cache, key[1])
        made.tokens[0, : len(inputs)] = tokens
        made.tokens[0, len(inputs) : key[1]] = tokens[0]
        return partial(self._run_filled, skeleton, made, key, len(inputs))

    @torch.inference_mode()
    def _run_filled(self, skeleton: Skeleton, made: _ModelGraphs, key: _Key, rows: int) -> torch.Tensor | None:
        graph = made.known.get(key)
        if graph is None or skeleton.addresses != key[0] or not skeleton.can_be_captured:
            return None
        made.known.move_to_end(key)
        skeleton.adapters.select(())
        graph.replay()
        return made.logits[:rows]

    def _key(self, skeleton: Skeleton, rows: int) -> _Key:
        return skeleton.addresses, min(graph_size(rows), self._batch_max)

    def forget(self, skeleton: Skeleton) -> None:
        """Free the graphs of a model that is forgotten."""
        self._models.pop(skeleton, None)
        used = {made.logits.shape[1] for made in self._models.values()}
        self._logits = {vocabulary: logits for vocabulary, logits in self._logits.items() if vocabulary in used}

    def _inputs(self, skeleton: Skeleton, cache: torch.Tensor) -> _ModelGraphs:
        blocks = blocks_for(skeleton.geometry.context_tokens, cache.shape[4])
        n, whole, vocabulary = self._batch_max, torch.int64, skeleton.geometry.vocabulary
        if vocabulary not in self._logits:
            self._logits[vocabulary] = torch.empty(n, vocabulary, dtype=torch.float32, device=self._device)
        return _ModelGraphs(
            tokens=torch.zeros(1, n, dtype=whole, device=self._device),
            positions=torch.zeros(1, n, dtype=whole, device=self._device),
            write=torch.zeros(3, n, dtype=whole, device=self._device),
            tables=torch.zeros(n, blocks, dtype=torch.int32, device=self._device),
            logits=self._logits[vocabulary],
        )

    @staticmethod
    def _fill(made: _ModelGraphs, inputs: Sequence[ChunkInput], cache: torch.Tensor, size: int) -> None:
        padded = [*inputs, *[inputs[0]] * (size - len(inputs))]
        rows, write = row_inputs(padded, per_slab=cache.shape[1], block_tokens=cache.shape[4])
        on_device, written, tables = upload(cache.device, rows, write, block_tables(padded))
        made.tokens[0, :size] = on_device[0]
        made.positions[0, :size] = on_device[1]
        made.write[:, :size] = written
        made.tables[:size, : tables.shape[1]] = tables

    def _capture(self, skeleton: Skeleton, cache: torch.Tensor, made: _ModelGraphs, key: _Key) -> None:
        """Run this step on the inputs that the graph will read, which compiles its kernels, and capture it. A model
        that cannot be captured runs without graphs, which is logged.
        """
        _forward(skeleton, cache, made, key[1])
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    _forward(skeleton, cache, made, key[1])
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            skeleton.can_have_graphs = False
            log.warning("decode steps of a model run without graphs", reason=str(error))
            return
        torch.cuda.current_stream().wait_stream(self._stream)
        made.known[key] = graph
        self.captures += 1


def _is_plain(chunk: Chunk) -> bool:
    """Whether it is one token of a sequence without an adapter: products with those are in no graph."""
    return chunk.count == 1 and not chunk.sequence.adapter


def _longest(inputs: Sequence[ChunkInput]) -> int:
    """The length of the longest block table."""
    return max(len(each.blocks) for each in inputs)


def _forward(skeleton: Skeleton, cache: torch.Tensor, made: _ModelGraphs, size: int) -> None:
    span = Span(first_row=0, tables=made.tables[:size], positions=made.positions[0, :size].view(size, 1))
    logits = skeleton.model(
        input_ids=made.tokens[:, :size],
        position_ids=made.positions[:, :size],
        use_cache=False,
        kv_step=KvStep(cache=cache, write=made.write[:, :size], spans=(span,)),
    ).logits
    made.logits[:size].copy_(logits[0])


def graph_size(sequences: int) -> int:
    """The size of the graph that runs so many sequences: 1, 2, 4, or a multiple of 8."""
    return next((size for size in _SMALL if sequences <= size), -(-sequences // _STEP) * _STEP)
