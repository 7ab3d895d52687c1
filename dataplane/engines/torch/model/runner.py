"""One forward pass of a step batch: chunks of tokens in, one row of logits or the final states per chunk out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataplane.engines.torch.model.attention import KvStep, Span
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.sequences import Chunk
from dataplane.memory.kv_cache import blocks_for


@torch.inference_mode()
def run_chunks(skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Run the chunks' tokens through the model, filling their KV blocks.

    The skeleton must be bound; `cache` is `KvStep.cache`. Returns the logits `[len(chunks), vocabulary]` after each
    chunk's last token, float32.
    """
    batch = _make_batch(cache, chunks)
    logits: torch.Tensor = skeleton.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        use_cache=False,
        logits_to_keep=batch.ends - 1,
        kv_step=batch.step,
    ).logits[0]
    return logits[torch.tensor(batch.order, device=logits.device).argsort()].float()


@torch.inference_mode()
def run_states(skeleton: Skeleton, cache: torch.Tensor, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """As `run_chunks`, without logits. Returns the final states `[count, hidden]` of each chunk's tokens."""
    batch = _make_batch(cache, chunks)
    states: torch.Tensor = skeleton.trunk(
        input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, kv_step=batch.step
    ).last_hidden_state[0]
    pieces = torch.split(states, [chunks[index].count for index in batch.order])
    by_index = dict(zip(batch.order, pieces, strict=True))
    return [by_index[index] for index in range(len(chunks))]


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The inputs of a forward pass. `order`: the chunks' indices as their rows follow each other; `ends`: the row after
    the last one of each; `tokens` and `positions` are `[1, rows]`.
    """

    order: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    step: KvStep


def _make_batch(cache: torch.Tensor, chunks: Sequence[Chunk]) -> _Batch:
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].count != 1)
    per_slab, block_tokens = cache.shape[1], cache.shape[4]
    rows = [_rows(chunks[index], block_tokens) for index in order]
    flat = torch.tensor([row for chunk_rows in rows for row in chunk_rows], device=cache.device)
    tokens, positions, blocks, offsets = flat.unbind(dim=1)
    write = torch.stack((blocks // per_slab, blocks % per_slab, offsets))
    ends = torch.tensor([len(chunk_rows) for chunk_rows in rows], device=cache.device).cumsum(0)
    spans = _spans([chunks[index] for index in order], positions, block_tokens, per_slab)
    # A block is written from its first offset on, and cleared then: attention multiplies masked entries by zero, and
    # zero times a NaN of an earlier owner would be NaN.
    begun = write[:2, offsets == 0]
    if begun.numel():
        cache[tuple(begun)] = 0
    step = KvStep(cache=cache, write=write, spans=spans)
    return _Batch(order=order, tokens=tokens[None], positions=positions[None], ends=ends, step=step)


def _rows(chunk: Chunk, block_tokens: int) -> list[tuple[int, int, int, int]]:
    """(token, position, block, offset in the block) of each token of the chunk."""
    sequence = chunk.sequence
    return [
        (sequence.tokens[at], at, sequence.kv.blocks[at // block_tokens], at % block_tokens)
        for at in range(sequence.cached, chunk.end)
    ]


def _spans(chunks: Sequence[Chunk], positions: torch.Tensor, block_tokens: int, per_slab: int) -> tuple[Span, ...]:
    """All single-token chunks as one span in front; each longer chunk as its own."""
    singles = [chunk for chunk in chunks if chunk.count == 1]
    groups = [singles] * bool(singles) + [[chunk] for chunk in chunks if chunk.count > 1]
    spans = []
    first_row = 0
    for group in groups:
        last_row = first_row + sum(chunk.count for chunk in group)
        span_positions = positions[first_row:last_row].view(len(group), -1)
        tables = _tables(group, block_tokens, positions.device)
        slabs = torch.stack((tables // per_slab, tables % per_slab))
        spans.append(Span(first_row=first_row, tables=slabs, positions=span_positions))
        first_row = last_row
    return tuple(spans)


def _tables(chunks: Sequence[Chunk], block_tokens: int, device: torch.device) -> torch.Tensor:
    """The blocks written so far `[len(chunks), longest]`. Shorter tables are padded with their first block, masked."""
    tables = [chunk.sequence.kv.blocks[: blocks_for(chunk.end, block_tokens)] for chunk in chunks]
    longest = max(len(table) for table in tables)
    return torch.tensor([table + table[:1] * (longest - len(table)) for table in tables], device=device)
