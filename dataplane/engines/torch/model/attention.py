"""Attention over the paged KV cache, called by transformers' own model classes.

A forward pass runs on flattened tokens `[1, T]` of several sequences: first those with one new token (decodes), one row
each, attended together; then the spans of longer ones (prefill chunks), one after another. Each sequence attends to its
own blocks only. On a GPU kernels read the blocks where they are (`paged_kernels.py`); elsewhere they are gathered.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "tidepool_paged"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A group of `n` sequences with `t` new tokens each: a decode batch (t = 1) or one prefill chunk (n = 1).

    Its rows are `[first_row, first_row + n * t)` of the flattened batch. `tables` `[n, b]`: blocks, those of a slab
    numbered one after another, padded with any valid ones; `positions` `[n, t]`: those of the new tokens.
    """

    first_row: int
    tables: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class KvStep:
    """The inputs of attention in one forward pass.

    `cache` is `[slabs, blocks_per_slab, layers, 2, block_tokens, kv_heads, head_dim]`: a block is contiguous over all
    layers. The new token of row `r` is written to slab `write[0, r]`, block `write[1, r]` in it, offset `write[2, r]`.
    """

    cache: torch.Tensor
    write: torch.Tensor
    spans: tuple[Span, ...]
    masks: dict[tuple[int, int | None, int], torch.Tensor] = field(default_factory=dict)
    places: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def place(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slabs of the blocks of span `index`, and the blocks' indices in them, made once per step."""
        if index not in self.places:
            tables, per_slab = self.spans[index].tables, self.cache.shape[1]
            self.places[index] = tables // per_slab, tables % per_slab
        return self.places[index]

    def mask(self, index: int, window: int | None, groups: int) -> torch.Tensor:
        """The attention mask of span `index`: bool `[n, 1, groups * t, s]`, made once per step and kind of layer.

        A token at p sees `max(0, p - window + 1) .. p`; `window` None is unlimited.
        """
        key = (index, window, groups)
        if key not in self.masks:
            span = self.spans[index]
            seen = torch.arange(span.tables.shape[1] * self.cache.shape[4], device=self.cache.device)
            positions = span.positions[:, :, None]
            mask = seen <= positions
            if window is not None:
                mask &= seen > positions - window
            n, t, s = mask.shape
            self.masks[key] = mask[:, None, None].expand(n, 1, groups, t, s).reshape(n, 1, groups * t, s)
        return self.masks[key]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_step: KvStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into the cache, then attend over each sequence's blocks.

    `query` is `[1, heads, T, head_dim]`, `key` and `value` `[1, kv_heads, T, head_dim]`; the result `[1, T, heads,
    head_dim]`. transformers hands `kv_step` down from the model's forward call.
    """
    layer_index: Any = module.layer_idx
    if query.is_cuda:
        return _by_kernels(layer_index, query[0], key[0], value[0], kv_step, scaling, sliding_window, softcap), None
    cache = kv_step.cache[:, :, layer_index]
    keys, values = cache[:, :, 0], cache[:, :, 1]
    keys[tuple(kv_step.write)] = key[0].transpose(0, 1)
    values[tuple(kv_step.write)] = value[0].transpose(0, 1)
    rows = query[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for index, span in enumerate(kv_step.spans):
        n, t = span.positions.shape
        q = rows[span.first_row : span.first_row + n * t].view(n, t, *rows.shape[1:])
        mask = kv_step.mask(index, sliding_window, groups)
        at = kv_step.place(index)
        outputs.append(_attend(q, _gather(keys, at), _gather(values, at), mask, scaling=scaling, softcap=softcap))
    return torch.cat(outputs).unsqueeze(0), None


def _by_kernels(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: KvStep,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """As `paged_attention`, on a GPU; inputs without their first dimension."""
    from dataplane.engines.torch.model import paged_kernels  # noqa: PLC0415  # Triton comes with CUDA builds of torch

    paged_kernels.write_rows(step.cache, layer, step.write, key, value)
    outputs = [
        paged_kernels.attend_rows(
            query[:, span.first_row : span.first_row + span.positions.numel()],
            step.cache,
            layer,
            span.tables,
            span.positions,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=softcap,
        )
        for span in step.spans
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _gather(blocks: torch.Tensor, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`blocks[at]`, in elements of 16 bytes where rows allow it: the cost of indexing is per element."""
    if blocks.shape[-1] * blocks.itemsize % torch.complex128.itemsize:
        return blocks[at]
    return blocks.view(torch.complex128)[at].view(blocks.dtype)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """`[n, t, heads, d]` queries over gathered `[n, b, block_tokens, kv_heads, d]`; returns `[n * t, heads, d]`.

    Query heads that share a KV head are laid side by side as further queries, so keys and values are never repeated.
    """
    n, t, heads, head_dim = query.shape
    k = keys.flatten(1, 2).transpose(1, 2)
    v = values.flatten(1, 2).transpose(1, 2)
    kv_heads = k.shape[1]
    q = query.reshape(n, t, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:
        scores = q @ k.transpose(-1, -2) * (head_dim**-0.5 if scaling is None else scaling)
        scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return out.reshape(n, kv_heads, -1, t, head_dim).permute(0, 3, 1, 2, 4).reshape(n * t, heads, head_dim)


def register() -> None:
    """Register `ATTENTION_NAME` as an `attn_implementation`, without a mask: `KvStep.mask` is ours, and transformers,
    before it makes one, would look for packed sequences in the positions and wait for the device. Idempotent.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
