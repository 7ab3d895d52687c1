"""KV that a CPU copies for attention is that of the block tables, and masks hide what a token must not see."""

import pytest
import torch

from dataplane.engines.torch.model.attention import KvStep, Span

LAYERS, BLOCK_TOKENS = 3, 4


def step_of(slab_bytes: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvStep:
    """Five slabs of random numbers, and tables of two sequences that go through all of them."""
    block_bytes = LAYERS * 2 * BLOCK_TOKENS * kv_heads * head_dim * dtype.itemsize
    per_slab = slab_bytes // block_bytes
    arena = torch.randn(5, slab_bytes // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    used = arena[:, : per_slab * block_bytes // dtype.itemsize]
    cache = used.view(5, per_slab, LAYERS, 2, BLOCK_TOKENS, kv_heads, head_dim)
    tables = torch.randperm(5 * per_slab, generator=torch.Generator().manual_seed(1))[: 5 * per_slab // 2 * 2]
    tables = torch.cat((tables.view(2, -1), torch.tensor([[0], [5 * per_slab - 1]])), dim=1)
    span = Span(first_row=0, tables=tables, positions=torch.tensor([[5], [2]]))
    return KvStep(cache=cache, write=torch.zeros(3, 2, dtype=torch.int64), spans=(span,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slab_bytes", "kv_heads", "head_dim"),
    [(2**14, 1, 64), (2**14, 2, 16), (2**14, 3, 20), (2**13 + 256, 1, 6)],
    ids=["whole", "small", "rest", "odd"],
)
def test_keys_and_values_are_those_of_the_tables(
    slab_bytes: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    step = step_of(slab_bytes, kv_heads, head_dim, dtype)
    tables, per_slab = step.spans[0].tables, step.cache.shape[1]
    for layer in range(LAYERS):
        there = step.cache[tables // per_slab, tables % per_slab, layer]
        expected = there.movedim(2, 0).flatten(2, 3)
        assert torch.equal(step.keys_values(0, layer), expected)


def test_a_mask_hides_what_comes_later_and_what_left_the_window() -> None:
    step = step_of(2**14, 1, 64, torch.float32)
    assert step.mask(0, None, groups=2).isfinite().sum(dim=-1).tolist() == [[[6, 6]], [[3, 3]]]
    window = step.mask(0, 2, groups=1)
    assert [row.isfinite().nonzero().flatten().tolist() for row in window[:, 0, 0]] == [[4, 5], [1, 2]]
    assert window[window.isfinite()].eq(0).all()
