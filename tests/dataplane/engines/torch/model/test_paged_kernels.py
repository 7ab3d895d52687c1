"""The attention kernels against attention over gathered blocks. Without a GPU Triton interprets them."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engines.torch.model.attention import KvStep, Span, paged_attention

kernels = pytest.importorskip(
    "dataplane.engines.torch.model.paged_kernels",
    reason="Triton comes with CUDA builds of torch: make test-kernels",
    exc_type=ModuleNotFoundError,
)

SLABS, PER_SLAB, LAYERS, BLOCK_TOKENS = 8, 3, 2, 4
LAYER = 1


def made_step(lengths: list[int], new: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvStep:
    """Sequences of these lengths, the last `new` tokens of which are new, in blocks of an arena with other owners."""
    cache = torch.full((SLABS, PER_SLAB, LAYERS, 2, BLOCK_TOKENS, kv_heads, head_dim), float("nan"), dtype=dtype)
    blocks = torch.randperm(SLABS * PER_SLAB).tolist()
    tables = [[blocks.pop() for _ in range(-(-length // BLOCK_TOKENS))] for length in lengths]
    write = []
    for table, length in zip(tables, lengths, strict=True):
        for block in table:
            cache[block // PER_SLAB, block % PER_SLAB] = torch.randn(cache.shape[2:]).to(dtype)
        for at in range(length - new, length):
            block = table[at // BLOCK_TOKENS]
            write.append((block // PER_SLAB, block % PER_SLAB, at % BLOCK_TOKENS))
    longest = max(map(len, tables))
    return KvStep(
        cache=cache,
        write=torch.tensor(write).T.contiguous(),
        spans=(
            Span(
                first_row=0,
                tables=torch.tensor([[*table, *table[:1] * (longest - len(table))] for table in tables]),
                positions=torch.tensor([[*range(length - new, length)] for length in lengths]),
            ),
        ),
    )


CASES: tuple[tuple[list[int], int, tuple[int, int, int], dict[str, Any]], ...] = (
    ([1], 1, (4, 2, 12), {}),
    ([9, 1, 12, 5], 1, (6, 3, 16), {}),
    ([9, 13, 2], 1, (4, 4, 12), {"sliding_window": 3}),
    ([30, 7], 1, (7, 1, 32), {"softcap": 1.5, "scaling": 0.4}),
    ([17], 11, (4, 2, 12), {}),
    ([70], 25, (3, 1, 16), {"sliding_window": 6, "softcap": 2.0}),
)
"""Lengths, new tokens of each; heads, KV heads and head_dim; options."""


@pytest.mark.parametrize(("lengths", "new", "sizes", "options"), CASES)
def test_kernels_attend_as_gathered_blocks_are_attended(
    lengths: list[int],
    new: int,
    sizes: tuple[int, int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "SPLITS_MAX", 2)  # what is interpreted takes a second for each sequence otherwise
    heads, kv_heads, head_dim = sizes
    torch.manual_seed(len(lengths) * heads)
    step = made_step(lengths, new, kv_heads, head_dim, torch.float32)
    rows = len(lengths) * new
    query, key, value = (torch.randn(1, count, rows, head_dim) for count in (heads, kv_heads, kv_heads))
    theirs = KvStep(cache=step.cache.clone(), write=step.write, spans=step.spans)
    expected, _ = paged_attention(SimpleNamespace(layer_idx=LAYER), query, key, value, None, kv_step=theirs, **options)  # type: ignore[arg-type]

    (span,), device = step.spans, "cuda" if torch.cuda.is_available() else "cpu"
    cache = step.cache.to(device)
    kernels.write_rows(cache, LAYER, step.write.to(device), key[0].to(device), value[0].to(device))
    out = kernels.attend_rows(
        query[0].to(device),
        cache,
        LAYER,
        span.tables.to(device),
        span.positions.to(device),
        scaling=options.get("scaling", head_dim**-0.5),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )

    assert torch.equal(cache.cpu().nan_to_num(7.0), theirs.cache.nan_to_num(7.0)), "other rows were written"
    assert torch.allclose(out.cpu(), expected[0], atol=2e-6, rtol=1e-5)


def test_parts_of_a_sequence_are_combined() -> None:
    """A part without a token of its own, or with one that sees nothing, adds nothing. Triton interprets no bfloat16."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    step = made_step([3], 1, 1, 16, dtype)
    (span,) = step.spans
    query, key, value = (torch.randn(1, 1, 16).to(dtype) for _ in range(3))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = step.cache.to(device)
    kernels.write_rows(cache, LAYER, step.write.to(device), key.to(device), value.to(device))
    assert kernels.splits_of(1) > 3
    out = kernels.attend_rows(
        query.to(device),
        cache,
        LAYER,
        span.tables.to(device),
        span.positions.to(device),
        scaling=1.0,
        window=2,
        softcap=None,
    )
    block = int(span.tables[0, 0])
    keys, values = (cache[block // PER_SLAB, block % PER_SLAB, LAYER, kind, 1:3, 0].cpu().float() for kind in (0, 1))
    weights = torch.softmax(query[0].float() @ keys.T, dim=-1)
    assert torch.allclose(out[:, 0].cpu().float(), weights @ values, atol=0.02)


@pytest.mark.parametrize(("programs", "splits"), [(1, 32), (8, 32), (9, 32), (132, 2), (200, 2), (264, 1), (5000, 1)])
def test_sequences_are_divided_until_the_gpu_is_full(programs: int, splits: int) -> None:
    assert kernels.splits_of(programs) == splits


COMPILES = """
import inspect
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dataplane.engines.torch.model import paged_kernels as kernels

POINTERS = {"tables": "*i32", "positions": "*i64", "write": "*i64", "scores": "*fp32", "parts": "*fp32"}
POINTERS |= dict.fromkeys(("query", "layer", "out", "key", "value"), "*bf16")

def shared_bytes(kernel, constants):
    names = inspect.signature(kernel.fn).parameters
    types = {name: POINTERS.get(name, "fp32" if name in ("scaling", "softcap") else "i32") for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 2}).metadata.shared

sizes = {"head_dim": 120, "dim": 128}
tiles = {"groups": 7, "block_tokens": 16, "tile_rows": 64, "tile_tokens": 64, "precision": "tf32"}
print(shared_bytes(kernels._write_kernel, sizes), end=" ")
print(shared_bytes(kernels._combine_kernel, {"splits": 32, **sizes}), end=" ")
for splits, flag in ((1, True), (32, False)):
    constants = {**sizes, **tiles, "splits": splits, "has_window": flag, "has_softcap": flag}
    print(shared_bytes(kernels._attend_kernel, constants), end=" ")
"""


def numbers_of(program: str) -> list[int]:
    """What a program prints, in which Triton interprets nothing."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [int(word) for word in ended.stdout.split()]


def test_kernels_compile_for_a_hopper_gpu() -> None:
    """Interpreted kernels may do what compiled ones may not. Compiling needs no GPU."""
    shared = numbers_of(COMPILES)
    assert len(shared) == 4
    assert max(shared) <= 227 * 1024, "more shared memory than a multiprocessor of a Hopper GPU has"


LAUNCHES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from dataplane.engines.torch.model import paged_kernels as kernels

class Launches:
    def __init__(self, kernel):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.compiled = set()

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.compiled.add(repr(self.bind(*arguments, **constants)[1:]))

names = ("_write_kernel", "_attend_kernel", "_combine_kernel")
for name in names:
    setattr(kernels, name, Launches(getattr(kernels, name)))
cache = torch.empty(8, 3, 2, 2, 16, 1, 64)
for rows in range(1, 9):
    key = torch.empty(rows, 1, 64).transpose(0, 1)
    kernels.write_rows(cache, 0, torch.zeros(3, rows, dtype=torch.int64), key, key)
    for blocks in range(1, 33):
        kernels.attend_rows(
            key, cache, 0, torch.zeros(rows, blocks, dtype=torch.int32), torch.zeros(rows, 1, dtype=torch.int64),
            scaling=1.0, window=None, softcap=None,
        )
for name in names:
    print(len(getattr(kernels, name).compiled), end=" ")
"""


def test_numbers_of_rows_and_blocks_share_compiled_kernels() -> None:
    assert numbers_of(LAUNCHES) == [1, 1, 1]
