"""One forward pass of a step batch: chunks of tokens in, one row of logits or the final states per chunk out.

On a slot of several GPUs, `run_chunks` and `run_states` let the other ranks run `forward_logits` and `forward_states`
on the same inputs.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from dataplane.engines.core.uploads import upload
from dataplane.engines.torch.model.attention import KvStep, Span
from dataplane.engines.torch.model.batch_kv import BatchKv
from dataplane.engines.torch.model.inputs import ChunkInput, block_tables, chunk_inputs, row_inputs
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.sequences import Chunk


def run_chunks(
    skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk], batch_kv: BatchKv | None = None
) -> torch.Tensor:
    """Run the chunks' tokens through the model, filling their KV blocks.

    The skeleton must be bound; `cache` is `KvStep.cache`; `batch_kv`: where KV of decodes is kept copied, on a CPU.
    Returns the logits `[len(chunks), vocabulary]` after each chunk's last token, float32.
    """
    inputs = chunk_inputs(chunks, cache.shape[4])
    if batch_kv is not None:
        lists = [chunk.sequence.kv.blocks for chunk in chunks]
        return _run_batch(skeleton, inputs, _make_batch(cache, inputs, batch_kv, lists))
    with nullcontext() if skeleton.mirror is None else skeleton.mirror.step("logits", inputs):
        return forward_logits(skeleton, cache, inputs)


def run_states(skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """As `run_chunks`, without logits. Returns the final states `[count, hidden]` of each chunk's tokens."""
    inputs = chunk_inputs(chunks, cache.shape[4])
    with nullcontext() if skeleton.mirror is None else skeleton.mirror.step("states", inputs):
        return forward_states(skeleton, cache, inputs)


@torch.inference_mode()
def forward_logits(skeleton: Skeleton, cache: torch.Tensor, inputs: Sequence[ChunkInput]) -> torch.Tensor:
    """See `run_chunks`."""
    return _run_batch(skeleton, inputs, _make_batch(cache, inputs))


@torch.inference_mode()
def prepare_logits(
    skeleton: Skeleton,
    cache: torch.Tensor,
    inputs: Sequence[ChunkInput],
    tokens: torch.Tensor,
    batch_kv: BatchKv | None,
    lists: Sequence[list[int]],
) -> Callable[[], torch.Tensor]:
    """Make and upload the inputs of `forward_logits`, and return what runs the pass. The chunks have one token each,
    those of `tokens` `[len(inputs)]`, int64, which are on the device already. `lists`: the blocks of the sequences.
    """
    batch = _make_batch(cache, inputs, batch_kv, lists)
    ordered = tokens if batch.batch_kv is None else tokens[batch.order]
    return partial(_run_batch, skeleton, inputs, replace(batch, tokens=ordered.unsqueeze(0)))


@torch.inference_mode()
def _run_batch(skeleton: Skeleton, inputs: Sequence[ChunkInput], batch: "_Batch") -> torch.Tensor:
    skeleton.adapters.select(inputs[index] for index in batch.order)
    logits: torch.Tensor = skeleton.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        use_cache=False,
        logits_to_keep=batch.last,
        kv_step=batch.step,
    ).logits[0]
    if batch.batch_kv is not None:
        batch.batch_kv.written()
    return logits.float()


@torch.inference_mode()
def forward_states(skeleton: Skeleton, cache: torch.Tensor, inputs: Sequence[ChunkInput]) -> list[torch.Tensor]:
    """See `run_states`."""
    batch = _make_batch(cache, inputs)
    skeleton.adapters.select(inputs[index] for index in batch.order)
    states: torch.Tensor = skeleton.trunk(
        input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, kv_step=batch.step
    ).last_hidden_state[0]
    pieces = torch.split(states, [inputs[index].count for index in batch.order])
    by_index = dict(zip(batch.order, pieces, strict=True))
    return [by_index[index] for index in range(len(inputs))]


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The inputs of a forward pass. `order`: the chunks' indices as their rows follow each other; `last`: the last row
    of each chunk, in the order that they were given; `tokens` and `positions` are `[1, rows]`. `batch_kv`: where KV of
    the decodes is copied, if it is.
    """

    order: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    step: KvStep
    batch_kv: BatchKv | None


@torch.inference_mode()
def _make_batch(
    cache: torch.Tensor,
    chunks: Sequence[ChunkInput],
    batch_kv: BatchKv | None = None,
    lists: Sequence[list[int]] = (),
) -> _Batch:
    """All inputs are made on the host and uploaded together: the host waits for nothing. `lists`: the blocks of each
    sequence, where there is a `batch_kv`.
    """
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].count != 1)
    decodes = [index for index in order if chunks[index].count == 1]
    places = None
    if batch_kv is not None and decodes:
        starts = [chunks[index].start for index in decodes]
        places = batch_kv.arrange(cache, [lists[index] for index in decodes], starts)
    for place, index in zip(places or (), decodes, strict=False):
        order[place] = index
    ordered = [chunks[index] for index in order]
    rows, written = row_inputs(ordered, per_slab=cache.shape[1], block_tokens=cache.shape[4])
    last = np.empty(len(chunks), dtype=np.int64)
    last[order] = np.cumsum([chunk.count for chunk in ordered]) - 1
    groups = _groups(ordered)
    tables = [block_tables(group) for group in groups]
    inputs, write, begun, last_rows, *on_device = upload(
        cache.device,
        rows,
        written,
        written[:2, written[2] == 0],
        last,
        *tables,
    )
    # A block is written from its first offset on, and cleared then: attention over gathered blocks multiplies masked
    # entries by zero, and zero times a NaN of an earlier owner would be NaN. Kernels do not read those entries.
    if begun.numel() and not cache.is_cuda:
        cache[tuple(begun)] = 0
    if places is None:
        batch_kv = None
    copied = None if batch_kv is None else batch_kv.rows(len(decodes), tables[0].shape[1] * cache.shape[4])
    step = KvStep(cache=cache, write=write, spans=_spans(groups, inputs[1], on_device), copied=copied)
    return _Batch(order=order, tokens=inputs[:1], positions=inputs[1:], last=last_rows, step=step, batch_kv=batch_kv)


def _groups(chunks: Sequence[ChunkInput]) -> list[list[ChunkInput]]:
    """All single-token chunks as one group in front; each longer chunk as its own."""
    singles = [chunk for chunk in chunks if chunk.count == 1]
    return [singles] * bool(singles) + [[chunk] for chunk in chunks if chunk.count > 1]


def _spans(
    groups: Sequence[Sequence[ChunkInput]], positions: torch.Tensor, tables: Sequence[torch.Tensor]
) -> tuple[Span, ...]:
    spans = []
    first_row = 0
    for group, table in zip(groups, tables, strict=True):
        last_row = first_row + sum(chunk.count for chunk in group)
        span_positions = positions[first_row:last_row].view(len(group), -1)
        spans.append(Span(first_row=first_row, tables=table, positions=span_positions))
        first_row = last_row
    return tuple(spans)
