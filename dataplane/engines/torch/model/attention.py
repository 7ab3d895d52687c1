"""Attention over the paged KV cache, called by transformers' own model classes.

A forward pass runs on flattened tokens `[1, T]` of several sequences: first those with one new token (decodes), one row
each, attended together; then the spans of longer ones (prefill chunks), one after another. Each sequence attends to its
own blocks only. On a GPU kernels read the blocks where they are (`paged_kernels.py`); elsewhere they are gathered, or
those of decodes are kept gathered (`batch_kv.py`).
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
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
    `copied`: the KV of the decodes, if a copy of it is kept: `[n, layers, 2, s, kv_heads, head_dim]`.
    """

    cache: torch.Tensor
    write: torch.Tensor
    spans: tuple[Span, ...]
    copied: torch.Tensor | None = None
    masks: dict[tuple[int, int | None, int], torch.Tensor] = field(default_factory=dict)
    places: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def written(self) -> tuple[torch.Tensor | slice, ...]:
        """`write` as an index of one layer of the cache, for keys and values together."""
        slabs, blocks, offsets = self.write
        return slabs, blocks, slice(None), offsets

    @cached_property
    def copies(self) -> tuple[torch.Tensor | slice, ...]:
        """Where the new tokens of decodes are, as an index of one layer of the copy."""
        positions = self.spans[0].positions[:, 0]
        return torch.arange(len(positions)), slice(None), positions

    @cached_property
    def rows(self) -> torch.Tensor:
        """The arena as rows `[r, block_tokens * kv_heads * head_dim]`: the keys, or the values, of a block in one layer
        are one row. Slabs may end with bytes that no block uses, so rows begin at all multiples of a common divisor of
        a slab's size and a row's, and overlap.
        """
        size = self.cache[0, 0, 0, 0].numel()
        apart = gcd(self.cache.stride(0), size)
        slabs, per_slab = self.cache.shape[:2]
        elements = (slabs - 1) * self.cache.stride(0) + per_slab * self.cache.stride(1)
        return self.cache.as_strided(((elements - size) // apart + 1, size), (apart, 1))

    def keys_values(self, index: int, layer: int) -> torch.Tensor:
        """A copy of the keys and values of span `index` in a layer: `[2, n, s, kv_heads, head_dim]`. To copy whole rows
        takes half to two thirds of the time of indexing the cache, whose cost is per element.
        """
        if self.copied is not None and index == 0:
            return self.copied[:, layer].transpose(0, 1)
        apart = self.rows.stride(0)
        tables = self.spans[index].tables
        if index not in self.places:
            slabs, blocks = tables // self.cache.shape[1], tables % self.cache.shape[1]
            keys = slabs * (self.cache.stride(0) // apart) + blocks * (self.cache.stride(1) // apart)
            self.places[index] = torch.stack((keys, keys + self.cache.stride(3) // apart)).flatten()
        first = layer * (self.cache.stride(2) // apart)
        copied = self.rows.index_select(0, self.places[index] + first)
        return copied.view(2, len(tables), -1, *self.cache.shape[5:])

    def write_new(self, layer: int, new: torch.Tensor) -> None:
        """Write new keys and values `[T, 2, kv_heads, head_dim]` of a layer to their blocks, and to the copy."""
        self.cache[:, :, layer][self.written] = new
        if self.copied is not None:
            self.copied[:, layer][self.copies] = new[: len(self.copied)]

    def mask(self, index: int, window: int | None, groups: int) -> torch.Tensor:
        """What is added to the scores of span `index`: 0 where a token sees another one, else minus infinity,
        `[n, 1, groups * t, s]`, made once per step and kind of layer.

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
            hidden = torch.zeros(mask.shape, dtype=self.cache.dtype).masked_fill_(~mask, float("-inf"))
            self.masks[key] = hidden[:, None, None].expand(n, 1, groups, t, s).reshape(n, 1, groups * t, s)
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
    kv_step.write_new(layer_index, torch.stack((key[0], value[0])).permute(2, 0, 1, 3))
    rows = query[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for index, span in enumerate(kv_step.spans):
        n, t = span.positions.shape
        q = rows[span.first_row : span.first_row + n * t].view(n, t, *rows.shape[1:])
        mask = kv_step.mask(index, sliding_window, groups)
        k, v = kv_step.keys_values(index, layer_index).transpose(2, 3)
        outputs.append(_attend(q, k, v, mask, scaling=scaling, softcap=softcap))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


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


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """`[n, t, heads, d]` queries over gathered `[n, kv_heads, s, d]`; returns `[n * t, heads, d]`.

    Query heads that share a KV head are laid side by side as further queries, so keys and values are never repeated.
    """
    n, t, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    q = query.reshape(n, t, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if softcap is None:
        out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = q @ keys.transpose(-1, -2) * (head_dim**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap + mask
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
    return out.reshape(n, kv_heads, -1, t, head_dim).permute(0, 3, 1, 2, 4).reshape(n * t, heads, head_dim)


def register() -> None:
    """Register `ATTENTION_NAME` as an `attn_implementation`, without a mask: `KvStep.mask` is ours, and transformers,
    before it makes one, would look for packed sequences in the positions and wait for the device. Idempotent.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
