"""Products of a few rows with packed weights, as Triton kernels: the path of a GPU's decode steps.

A program unpacks a tile of weights after the other in registers and multiplies it by a tile of rows, with sums in
float32. So a step reads the packed bytes once and writes no unpacked ones. Where few programs would leave most of the
GPU idle, the inputs are divided among `splits` programs, whose sums are added. Launches depend on shapes alone, and
nothing waits for the host, so that a graph may capture them.

With `experts` every row is multiplied by the weights of its own expert, of tensors that hold those of all, one after
another.

Tiles of inputs are those of `tile` int32 of GPTQ, each of which holds 8 or 4 inputs, and of `tile` inputs elsewhere:

    gptq   inputs 8 w + j of the words w of a tile, j after j:    x[:, 8 w + j] @ (q[w] >> 4 j & 15)
    awq    all inputs of a tile; a word has 8 outputs, in the places 0 4 1 5 2 6 3 7
    fp8    all inputs of a tile
"""

from typing import Any

import torch
import triton
import triton.language as tl

ROWS_MIN, ROWS_MAX = 16, 64
"""Of a tile: the least that the tensor cores multiply, and the most that registers hold."""
TILE_OUTPUTS = 64
TILE_WORDS, TILE_INPUTS = 16, 64
PROGRAMS_WANTED = 264
"""Two for each multiprocessor of a large card."""
SPLITS_MAX = 16


def _locate_rows(
    experts: tl.tensor, count: tl.tensor, tile_rows: tl.constexpr, has_experts: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The rows of this program, which of them exist, and their expert."""
    number, at = tl.program_id(0), tl.arange(0, tile_rows)
    if has_experts:
        rows, exist, expert = number + at, at < 1, tl.load(experts + number).to(tl.int64)
    else:
        rows = number * tile_rows + at
        exist, expert = rows < count, tl.zeros([], tl.int64)
    return rows, exist, expert


def _part_of_tiles(tiles: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The first tile of this program's part, and where it ends."""
    each = tl.cdiv(tiles, tl.num_programs(2))
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, tiles)


def _load_scaling(
    zeros: tl.tensor,
    scales: tl.tensor,
    group: tl.tensor,
    exists: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    shift: tl.constexpr,
    bits: tl.constexpr,
    is_awq: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Zero points and scales `[groups, outputs]`, in float32."""
    per: tl.constexpr = 32 // bits
    is_output = exists[:, None] & (output < outputs)[None, :]
    word = tl.load(zeros + group[:, None] * (outputs // per) + output[None, :] // per, mask=is_output, other=0)
    place = output % per
    if is_awq:
        place = place // 2 + place % 2 * 4
    zero = ((word + shift) >> (place * bits)[None, :]) & ((1 << bits) - 1)
    scale = tl.load(scales + group[:, None] * outputs + output[None, :], mask=is_output, other=0.0)
    return zero.to(tl.float32), scale.to(tl.float32)


_rows: Any = triton.jit(_locate_rows)
_part: Any = triton.jit(_part_of_tiles)
_scaling: Any = triton.jit(_load_scaling)


# fmt: off
def _store_sums(
    out: tl.tensor, sums: tl.tensor, rows: tl.tensor, exist: tl.tensor, output: tl.tensor, count: tl.tensor,
    outputs: tl.tensor,
) -> None:
    """`out` `[splits, rows, outputs]`."""
    to = (tl.program_id(2).to(tl.int64) * count + rows[:, None]) * outputs + output[None, :]
    tl.store(out + to, sums, mask=exist[:, None] & (output < outputs)[None, :])


_store: Any = triton.jit(_store_sums)


def _gptq(
    input: tl.tensor, packed: tl.tensor, zeros: tl.tensor, scales: tl.tensor, index: tl.tensor, experts: tl.tensor,
    out: tl.tensor, count: tl.tensor, inputs: tl.tensor, outputs: tl.tensor, group: tl.tensor, groups: tl.tensor,
    shift: tl.constexpr, bits: tl.constexpr, by_index: tl.constexpr, one_group: tl.constexpr,
    word_in_group: tl.constexpr, tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile: tl.constexpr,
    has_experts: tl.constexpr, precision: tl.constexpr,
) -> None:
    """`one_group`: all inputs of a tile have one scale; `word_in_group`: at least those of an int32 have."""
    per: tl.constexpr = 32 // bits
    rows, exist, expert = _rows(experts, count, tile_rows, has_experts)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    words = tl.cdiv(inputs, per)
    packed += expert * words * outputs
    zeros += expert * groups * (outputs // per)
    scales += expert * groups * outputs
    index += expert * inputs
    first, end = _part(tl.cdiv(words, tile))
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    for number in range(first, end):
        word = number * tile + tl.arange(0, tile)
        is_word = word < words
        of_outputs = is_word[:, None] & (output < outputs)[None, :]
        numbers = tl.load(packed + word[:, None] * outputs + output[None, :], mask=of_outputs, other=0)
        if one_group:
            at = tl.zeros([1], tl.int32) + number * tile * per // group
            zero, scale = _scaling(zeros, scales, at, at < groups, output, outputs, shift, bits, False)
        elif word_in_group:
            zero, scale = _scaling(zeros, scales, word * per // group, is_word, output, outputs, shift, bits, False)
        for place in tl.static_range(per):
            at_input = word * per + place
            is_input = at_input < inputs
            x = tl.load(
                input + rows[:, None] * inputs + at_input[None, :], mask=exist[:, None] & is_input[None, :], other=0.0
            )
            if not word_in_group:
                of_group = tl.load(index + at_input, mask=is_input, other=0) if by_index else at_input // group
                zero, scale = _scaling(zeros, scales, of_group, is_input, output, outputs, shift, bits, False)
            weights = (((numbers >> (place * bits)) & ((1 << bits) - 1)).to(tl.float32) - zero) * scale
            sums = tl.dot(x, weights.to(x.dtype), sums, input_precision=precision)
    _store(out, sums, rows, exist, output, count, outputs)


def _awq(
    input: tl.tensor, packed: tl.tensor, zeros: tl.tensor, scales: tl.tensor, experts: tl.tensor, out: tl.tensor,
    count: tl.tensor, inputs: tl.tensor, outputs: tl.tensor, group: tl.tensor, groups: tl.tensor,
    one_group: tl.constexpr, tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile: tl.constexpr,
    has_experts: tl.constexpr, precision: tl.constexpr,
) -> None:
    """`one_group`: all inputs of a tile have one scale."""
    rows, exist, expert = _rows(experts, count, tile_rows, has_experts)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    column = tl.program_id(1) * (tile_outputs // 8) + tl.arange(0, tile_outputs // 8)
    columns = outputs // 8
    packed += expert * inputs * columns
    zeros += expert * groups * columns
    scales += expert * groups * outputs
    place = output % 8 // 2 + output % 2 * 4
    first, end = _part(tl.cdiv(inputs, tile))
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    for number in range(first, end):
        at_input = number * tile + tl.arange(0, tile)
        is_input = at_input < inputs
        of_columns = is_input[:, None] & (column < columns)[None, :]
        words = tl.load(packed + at_input[:, None] * columns + column[None, :], mask=of_columns, other=0)
        words = tl.interleave(words, words)
        words = tl.interleave(words, words)
        words = tl.interleave(words, words)
        if one_group:
            at = tl.zeros([1], tl.int32) + number * tile // group
            zero, scale = _scaling(zeros, scales, at, at < groups, output, outputs, 0, 4, True)
        else:
            zero, scale = _scaling(zeros, scales, at_input // group, is_input, output, outputs, 0, 4, True)
        x = tl.load(
            input + rows[:, None] * inputs + at_input[None, :], mask=exist[:, None] & is_input[None, :], other=0.0
        )
        weights = (((words >> (place * 4)[None, :]) & 15).to(tl.float32) - zero) * scale
        sums = tl.dot(x, weights.to(x.dtype), sums, input_precision=precision)
    _store(out, sums, rows, exist, output, count, outputs)


def _fp8(
    input: tl.tensor, packed: tl.tensor, scales: tl.tensor, experts: tl.tensor, out: tl.tensor, count: tl.tensor,
    inputs: tl.tensor, outputs: tl.tensor, tall: tl.tensor, wide: tl.tensor, one_group: tl.constexpr,
    tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile: tl.constexpr, has_experts: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """`packed` in bytes. `tall` outputs and `wide` inputs share a scale; `one_group`: so do all inputs of a tile."""
    rows, exist, expert = _rows(experts, count, tile_rows, has_experts)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = output < outputs
    blocks = tl.cdiv(inputs, wide)
    packed += expert * inputs * outputs
    scales += expert * blocks * tl.cdiv(outputs, tall)
    first, end = _part(tl.cdiv(inputs, tile))
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    for number in range(first, end):
        at_input = number * tile + tl.arange(0, tile)
        is_input = at_input < inputs
        both = is_input[:, None] & is_output[None, :]
        eight = tl.load(packed + output[None, :].to(tl.int64) * inputs + at_input[:, None], mask=both, other=0)
        eight = eight.to(tl.int32)
        exponent, fraction = (eight >> 3) & 15, eight & 7
        normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
        size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
        of_block = at_input // wide
        if one_group:
            of_block = tl.zeros([1], tl.int32) + number * tile // wide
        scale = tl.load(
            scales + (output // tall)[None, :] * blocks + of_block[:, None],
            mask=(of_block < blocks)[:, None] & is_output[None, :],
            other=0.0,
        )
        x = tl.load(
            input + rows[:, None] * inputs + at_input[None, :], mask=exist[:, None] & is_input[None, :], other=0.0
        )
        weights = tl.where(eight >= 128, -size, size) * scale.to(tl.float32)
        sums = tl.dot(x, weights.to(x.dtype), sums, input_precision=precision)
    _store(out, sums, rows, exist, output, count, outputs)
# fmt: on


# A kernel is compiled once for all numbers of rows with one size of tile: else it would be again for 1 and for 16.
_compiled: Any = triton.jit(do_not_specialize=["count"])
_gptq_kernel, _awq_kernel, _fp8_kernel = _compiled(_gptq), _compiled(_awq), _compiled(_fp8)


def gptq_product(
    input: torch.Tensor,
    packed: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    index: torch.Tensor | None,
    *,
    group: int,
    bits: int,
    shift: int,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[rows, inputs]` to `[rows, outputs]`. `index`: of each input's group, if they are in any order; `shift`: what is
    added to each int32 of zero points; `experts` `[rows]`.
    """
    per = 32 // bits
    word_in_group = index is None and group % per == 0
    return _launch(
        _gptq_kernel,
        input,
        (packed, zeros, scales, packed if index is None else index),
        experts,
        outputs=scales.shape[-1],
        numbers=(group, scales.shape[-2]),
        tile=TILE_WORDS,
        tiles=triton.cdiv(packed.shape[-2], TILE_WORDS),
        shift=shift,
        bits=bits,
        by_index=index is not None,
        one_group=word_in_group and group % (TILE_WORDS * per) == 0,
        word_in_group=word_in_group,
    )


def awq_product(
    input: torch.Tensor,
    packed: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[rows, inputs]` to `[rows, outputs]`; `experts` `[rows]`."""
    return _launch(
        _awq_kernel,
        input,
        (packed, zeros, scales),
        experts,
        outputs=scales.shape[-1],
        numbers=(group, scales.shape[-2]),
        tile=TILE_INPUTS,
        tiles=triton.cdiv(input.shape[1], TILE_INPUTS),
        one_group=group % TILE_INPUTS == 0,
    )


def fp8_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[rows, inputs]` to `[rows, outputs]`, with a scale for each `block` of outputs and inputs; `experts`
    `[rows]`.
    """
    return _launch(
        _fp8_kernel,
        input,
        (weight.view(torch.uint8), scales),
        experts,
        outputs=weight.shape[-2],
        numbers=block,
        tile=TILE_INPUTS,
        tiles=triton.cdiv(input.shape[1], TILE_INPUTS),
        one_group=block[1] % TILE_INPUTS == 0,
    )


def _launch(
    kernel: Any,
    input: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    experts: torch.Tensor | None,
    *,
    outputs: int,
    numbers: tuple[int, ...],
    tile: int,
    tiles: int,
    **constants: Any,
) -> torch.Tensor:
    """`tiles`: of the inputs."""
    rows, inputs = input.shape
    tile_rows = ROWS_MIN if experts is not None else min(max(triton.next_power_of_2(rows), ROWS_MIN), ROWS_MAX)
    row_tiles = rows if experts is not None else triton.cdiv(rows, tile_rows)
    output_tiles = triton.cdiv(outputs, TILE_OUTPUTS)
    splits = splits_of(row_tiles * output_tiles, tiles)
    out = input.new_empty(splits, rows, outputs, dtype=input.dtype if splits == 1 else torch.float32)
    kernel[(row_tiles, output_tiles, splits)](
        input.contiguous(),
        *tensors,
        tensors[0] if experts is None else experts,
        out,
        rows,
        inputs,
        outputs,
        *numbers,
        tile_rows=tile_rows,
        tile_outputs=TILE_OUTPUTS,
        tile=tile,
        has_experts=experts is not None,
        precision="ieee" if input.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
        **constants,
    )
    return out[0] if splits == 1 else out.sum(dim=0).to(input.dtype)


def splits_of(programs: int, tiles: int) -> int:
    """Among how many programs the `tiles` of the inputs are divided, where there would be so many programs without: a
    power of two.
    """
    splits = 1
    while programs * splits < PROGRAMS_WANTED and splits < SPLITS_MAX and 2 * splits <= tiles:
        splits *= 2
    return splits
