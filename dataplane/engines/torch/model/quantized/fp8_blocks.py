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
    most = max(BLOCK_NUMBERS // inputs, 1)
    bits = torch.empty(min(most, tall, outputs), inputs, dtype=torch.int32)
    rows = scales.float().repeat_interleave(wide, dim=1)[:, :inputs]
    blocks = torch.split(weight.view(torch.int8), tall)
    if len(input) <= ROWS_SCALED:
        scaled = (input.float() * _HALF_SCALE) * rows[:, None]
        parts = [
            linear(x, _unpacked(part, bits))
            for x, one in zip(scaled, blocks, strict=True)
            for part in torch.split(one, most)
        ]
        return torch.cat(parts, dim=1).mul_(_HALF_SCALE).to(input.dtype)
    half_scaled, out, end = input * _HALF_SCALE, input.new_empty(len(input), outputs), 0
    for row, one in zip(rows * _HALF_SCALE, blocks, strict=True):
        for part in torch.split(one, most):
            start, end = end, end + len(part)
            out[:, start:end] = linear(half_scaled, _unpacked(part, bits).mul_(row).to(input.dtype))
    return out


def _unpacked(eights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The weights as float32, 2^120 times too small, in the memory of `bits`."""
    mine = bits[: len(eights)]
    mine.copy_(eights).mul_(_TO_FLOAT).bitwise_and_(_SIGN_AND_NUMBER)
    return mine.view(torch.float32)
