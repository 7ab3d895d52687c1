"""Products of E4M3 weights on a CPU, a few outputs at a time, so that what is unpacked stays in its cache.

torch converts one 8-bit number after the other. Here whole rows become float32 by their bits: sign, exponent and
fraction are moved to where float32 has them, which makes each number 2^120 times too small, as the exponents count from
-127 there and from -7 here.
"""

import torch
from torch.nn.functional import linear

BLOCK_NUMBERS = 2**17
"""At most so many weights are unpacked at a time, but at least one row."""
ROWS_SCALED = 4
"""Up to so many rows it is less to scale the inputs than the weights."""
_TO_FLOAT = 1 << 20
_SIGN_AND_NUMBER = (0x7F << 20) - 2**31
_HALF_SCALE = 2.0**60
"""Twice, before and after a product: inputs times all of 2^120 could be beyond float32."""


def product(input: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """`[rows, inputs]` to `[rows, outputs]`: `weight` `[outputs, inputs]`, with one of `scales` for each block of so
    many outputs and inputs.
    """
    (outputs, inputs), (tall, wide) = weight.shape, block
    wide_scales = scales.float().repeat_interleave(wide, dim=1)[:, :inputs]
    few = len(input) <= ROWS_SCALED
    numbers = input.float() * _HALF_SCALE if few else input
    out = numbers.new_empty(len(input), outputs)
    most = max(BLOCK_NUMBERS // inputs, 1)
    bits = torch.empty(min(most, tall, outputs), inputs, dtype=torch.int32)
    for number, row in enumerate(wide_scales):
        end = min((number + 1) * tall, outputs)
        scaled = numbers * row if few else numbers
        for start in range(number * tall, end, most):
            stop = min(start + most, end)
            part = _unpacked(weight[start:stop], bits)
            if not few:
                part = part.mul_(_HALF_SCALE).mul_(row * _HALF_SCALE).to(input.dtype)
            out[:, start:stop] = linear(scaled, part)
    return out.mul_(_HALF_SCALE).to(input.dtype) if few else out


def _unpacked(weight: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The weights as float32, 2^120 times too small, in the memory of `bits`."""
    mine = bits[: len(weight)]
    mine.copy_(weight.view(torch.int8)).mul_(_TO_FLOAT).bitwise_and_(_SIGN_AND_NUMBER)
    return mine.view(torch.float32)
