"""Attention on the block table, and writes to it, as Triton kernels: the path of a GPU.

A program attends a tile of rows, which are the query heads of one KV head and of some new tokens of one sequence, over
a part of that sequence's tokens, read from their blocks one tile at a time (FlashAttention's running softmax). Where
few programs would leave most of the GPU idle, the tokens of a sequence are divided among `splits` programs, whose
partial results are combined (Flash-Decoding). Shapes and launches depend on the number of rows alone, not on contexts,
so that a captured graph serves any.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

ROWS_MIN, ROWS_MAX = 16, 64
"""Of a tile: the least that the tensor cores multiply, and the most that registers hold."""
TILE_TOKENS = 64
"""Half as many where a number takes 4 bytes, or a head has over `HEAD_DIM_WIDE` numbers: shared memory is limited."""
HEAD_DIM_WIDE = 128
PROGRAMS_WANTED = 264
"""Two for each multiprocessor of a large card."""
SPLITS_MAX = 32


class Strides(NamedTuple):
    """Of the KV cache of one layer, in numbers: see `KvStep.cache`."""

    slab: int
    block: int
    kv: int
    token: int
    head: int

    @classmethod
    def of(cls, cache: torch.Tensor) -> "Strides":
        """`cache` is that of all layers."""
        slab, block, _, kv, token, head, _ = cache.stride()
        return cls(slab, block, kv, token, head)


def _write(
    key: tl.tensor,
    value: tl.tensor,
    layer: tl.tensor,
    write: tl.tensor,
    rows: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    value_head: tl.tensor,
    value_row: tl.tensor,
    slab: tl.tensor,
    block: tl.tensor,
    kv: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
) -> None:
    """One row's key and value of one head."""
    row, at_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = tl.load(write + row) * slab + tl.load(write + rows + row) * block + tl.load(write + 2 * rows + row) * token
    at = tl.arange(0, dim)
    target = layer + to + at_head * head + at
    inside = at < head_dim
    tl.store(target, tl.load(key + at_head * key_head + row * key_row + at, mask=inside), mask=inside)
    tl.store(target + kv, tl.load(value + at_head * value_head + row * value_row + at, mask=inside), mask=inside)


def _visible(
    score: tl.tensor,
    seen: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    has_window: tl.constexpr,
    has_softcap: tl.constexpr,
) -> tl.tensor:
    """The scores `[rows, tokens]` of rows at `position` for the tokens `seen` of a sequence: minus infinity for those
    that a row does not see.
    """
    if has_softcap:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    sees = (seen < end)[None, :] & (seen[None, :] <= position[:, None])
    if has_window:
        sees = sees & (seen[None, :] > position[:, None] - window)
    return tl.where(sees, score, float("-inf"))


def _in_blocks(
    table: tl.tensor,
    seen: tl.tensor,
    exists: tl.tensor,
    per_slab: tl.tensor,
    slab: tl.tensor,
    block: tl.tensor,
    token: tl.tensor,
    block_tokens: tl.constexpr,
) -> tl.tensor:
    """Where the tokens `seen` of a sequence lie, by its block table."""
    number = tl.load(table + seen // block_tokens, mask=exists, other=0).to(tl.int64)
    return (number // per_slab) * slab + (number % per_slab) * block + (seen % block_tokens) * token


def _tokens_of_part(
    position: tl.tensor,
    is_row: tl.tensor,
    window: tl.tensor,
    part: tl.tensor,
    splits: tl.constexpr,
    tile_tokens: tl.constexpr,
    has_window: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where the tokens end that rows at `position` see, and the first and the end of those that a part has."""
    end = tl.max(position, 0) + 1
    begin = 0
    if has_window:
        begin = tl.maximum(tl.min(tl.where(is_row, position, end), 0) - window + 1, 0) // tile_tokens
    tiles = tl.cdiv(end, tile_tokens) - begin
    each = tl.cdiv(tiles, splits)
    first = (begin + part * each) * tile_tokens
    return end, first, tl.minimum(first + each * tile_tokens, end)


_scored: Any = triton.jit(_visible)
_bounds: Any = triton.jit(_tokens_of_part)
_place: Any = triton.jit(_in_blocks)


# fmt: off
def _attend(
    query: tl.tensor, layer: tl.tensor, tables: tl.tensor, positions: tl.tensor, out: tl.tensor, scores: tl.tensor,
    scaling: tl.tensor, window: tl.tensor, softcap: tl.tensor, count: tl.tensor, query_row: tl.tensor,
    query_head: tl.tensor, table_row: tl.tensor, per_slab: tl.tensor, slab: tl.tensor, block: tl.tensor,
    kv: tl.tensor, token: tl.tensor, head: tl.tensor, heads: tl.tensor, groups: tl.constexpr,
    block_tokens: tl.constexpr, head_dim: tl.constexpr, dim: tl.constexpr, tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr, splits: tl.constexpr, has_window: tl.constexpr, has_softcap: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """A tile of rows over a part of their sequence. `out` `[rows, heads, splits, head_dim]`, with `scores` `[2, rows,
    heads, splits]` for the largest score and the sum of weights of each part; one split writes the result itself.
    """
    kv_head = tl.program_id(1)
    sequence, part = (tl.program_id(2) // splits).to(tl.int64), tl.program_id(2) % splits
    number = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    new, at_head = number // groups, kv_head * groups + number % groups
    is_row = new < count
    row = sequence * count + new
    position = tl.load(positions + row, mask=is_row, other=0).to(tl.int32)
    at = tl.arange(0, dim)
    inside = at < head_dim
    q = tl.load(
        query + row[:, None] * query_row + at_head[:, None] * query_head + at[None, :],
        mask=is_row[:, None] & inside[None, :],
        other=0.0,
    )
    end, first, last = _bounds(position, is_row, window, part, splits, tile_tokens, has_window)
    largest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    mixed = tl.zeros([tile_rows, dim], tl.float32)
    for start in range(first, last, tile_tokens):
        seen = start + tl.arange(0, tile_tokens)
        exists = seen < end
        place = kv_head * head + _place(
            tables + sequence * table_row, seen, exists, per_slab, slab, block, token, block_tokens
        )
        keys = tl.load(layer + place[None, :] + at[:, None], mask=exists[None, :] & inside[:, None], other=0.0)
        score = tl.dot(q, keys, input_precision=precision) * scaling
        score = _scored(score, seen, position, end, window, softcap, has_window, has_softcap)
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp(score - base[:, None])
        kept = tl.exp(largest - base)
        values = tl.load(layer + kv + place[:, None] + at[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        total = total * kept + tl.sum(weight, 1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(values.dtype), values, input_precision=precision)
        largest = larger
    written = is_row[:, None] & inside[None, :]
    to = (row * heads + at_head) * splits + part
    if splits == 1:
        tl.store(out + to[:, None] * head_dim + at[None, :], mixed / total[:, None], mask=written)
    else:
        tl.store(out + to[:, None] * head_dim + at[None, :], mixed, mask=written)
        tl.store(scores + to, largest, mask=is_row)
        tl.store(scores + to + tl.num_programs(2).to(tl.int64) * count * heads, total, mask=is_row)
# fmt: on


def _combine(
    parts: tl.tensor,
    scores: tl.tensor,
    out: tl.tensor,
    half: tl.tensor,
    splits: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
) -> None:
    """The result of one row and head from its parts."""
    row = tl.program_id(0).to(tl.int64)
    part, at = tl.arange(0, splits), tl.arange(0, dim)
    inside = at < head_dim
    largest = tl.load(scores + row * splits + part)
    total = tl.load(scores + half + row * splits + part)
    weight = tl.exp(largest - tl.max(largest, 0))
    each = tl.load(parts + (row * splits + part)[:, None] * head_dim + at[None, :], mask=inside[None, :], other=0.0)
    mixed = tl.sum(each * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row * head_dim + at, mixed, mask=inside)


# A kernel is compiled once for all numbers of rows and blocks: else it would be again for 1 and for multiples of 16.
_write_kernel: Any = triton.jit(do_not_specialize=["rows"])(_write)
_attend_kernel: Any = triton.jit(do_not_specialize=["table_row"])(_attend)
_combine_kernel: Any = triton.jit(do_not_specialize=["half"])(_combine)


def write_rows(cache: torch.Tensor, layer: int, write: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write new keys and values `[kv_heads, rows, head_dim]` to their blocks: `write` as in `KvStep`."""
    heads, rows, head_dim = key.shape
    strides = Strides.of(cache)
    _write_kernel[(rows, heads)](
        key,
        value,
        cache[:, :, layer],
        write,
        write.stride(0),
        *key.stride()[:2],
        *value.stride()[:2],
        *strides,
        head_dim=head_dim,
        dim=triton.next_power_of_2(head_dim),
    )


def attend_rows(
    query: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of `n` sequences with `t` new tokens each: `query` `[heads, n * t, head_dim]`, `tables` `[n, b]` of
    blocks, `positions` `[n, t]`. Returns `[n * t, heads, head_dim]`, in the type of `query`.
    """
    heads, rows, head_dim = query.shape
    (n, t), kv_heads = positions.shape, cache.shape[5]
    groups = heads // kv_heads
    tile_rows = min(max(triton.next_power_of_2(t * groups), ROWS_MIN), ROWS_MAX)
    tiles = triton.cdiv(t * groups, tile_rows)
    splits = splits_of(n * tiles * kv_heads)
    out = query.new_empty(rows, heads, head_dim)
    parts = out if splits == 1 else out.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
    scores = out if splits == 1 else out.new_empty(2, rows, heads, splits, dtype=torch.float32)
    dim = max(triton.next_power_of_2(head_dim), 16)
    sizes = {"splits": splits, "head_dim": head_dim, "dim": dim}
    _attend_kernel[(tiles, kv_heads, n * splits)](
        query,
        cache[:, :, layer],
        tables,
        positions,
        parts,
        scores,
        scaling,
        window or 0,
        softcap or 0.0,
        t,
        query.stride(1),
        query.stride(0),
        tables.stride(0),
        cache.shape[1],
        *Strides.of(cache),
        heads,
        groups=groups,
        block_tokens=cache.shape[4],
        tile_rows=tile_rows,
        has_window=window is not None,
        has_softcap=softcap is not None,
        **sizes,
        **_tiling(query, tile_rows * dim),
    )
    if splits > 1:
        _combine_kernel[(rows * heads,)](parts, scores, out, rows * heads * splits, **sizes)
    return out


def _tiling(query: torch.Tensor, tile_numbers: int) -> dict[str, Any]:
    """How a tile of so many numbers of `query` is computed."""
    is_wide = query.itemsize > 2 or query.shape[-1] > HEAD_DIM_WIDE
    return {
        "tile_tokens": TILE_TOKENS // 2 if is_wide else TILE_TOKENS,
        "precision": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": 8 if tile_numbers > 4096 else 4,
        "num_stages": 1 if is_wide else 2,
    }


def splits_of(programs: int) -> int:
    """Among how many programs the tokens of a sequence are divided, where there would be so many without: a power of
    two.
    """
    splits = 1
    while programs * splits < PROGRAMS_WANTED and splits < SPLITS_MAX:
        splits *= 2
    return splits
