"""Products of E4M3 weights on a CPU are those of the numbers that they stand for, all 254 of them."""

import pytest
import torch

from dataplane.engines.torch.model.quantized import fp8_blocks


def test_every_number_is_unpacked_exactly() -> None:
    """Those without an exponent and both zeros too. The two that are no numbers are left out."""
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = every[~every.float().isnan()].view(1, -1)
    assert numbers.numel() == 254
    unpacked = fp8_blocks._unpacked(numbers.view(torch.int8), torch.empty(1, 254, dtype=torch.int32))
    assert torch.equal(unpacked.double() * 2.0**120, numbers.double())


@pytest.mark.parametrize("rows", [1, fp8_blocks.ROWS_SCALED, fp8_blocks.ROWS_SCALED + 1, 40])
@pytest.mark.parametrize("block", [(128, 128), (48, 20), (1, 300), (10**6, 10**6)])
@pytest.mark.parametrize("numbers", [2**17, 700])
def test_products_are_those_of_scaled_numbers(
    rows: int, block: tuple[int, int], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_blocks, "BLOCK_NUMBERS", numbers)
    chance = torch.Generator().manual_seed(rows)
    weight = (torch.randn(200, 300, generator=chance) * 50).to(torch.float8_e4m3fn)
    tall, wide = (min(side, size) for side, size in zip(block, weight.shape, strict=True))
    scales = torch.rand(-(-200 // tall), -(-300 // wide), generator=chance)
    whole = scales.repeat_interleave(tall, 0)[:200].repeat_interleave(wide, 1)[:, :300]
    rows_in = torch.randn(rows, 300, generator=chance)
    given = rows_in.clone()
    exact = rows_in.double() @ (weight.double() * whole.double()).T
    out = fp8_blocks.product(rows_in, weight, scales, (tall, wide))
    assert torch.equal(rows_in, given)
    assert torch.allclose(out.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    halves = fp8_blocks.product(rows_in.bfloat16(), weight, scales, (tall, wide))
    assert halves.dtype == torch.bfloat16
    assert (halves.double() - exact).norm() < 0.01 * exact.norm()
