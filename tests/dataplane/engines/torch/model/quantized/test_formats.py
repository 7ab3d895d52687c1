"""Unpacked weights are the numbers that they stand for, rounded once."""

import pytest
import torch

from dataplane.engines.torch.model.quantized.config import Quantization
from dataplane.engines.torch.model.quantized.formats import Fp8Format, Shape


@pytest.mark.parametrize("block", [(64, 128), None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_8_bit_weights_are_not_rounded(block: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """In bfloat16 a scale could be off by 0.4 %, and all weights of its block with it, to the same side."""
    outputs, inputs = 200, 300
    tall, wide = block or (outputs, inputs)
    chance = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=chance) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // tall), -(-inputs // wide), generator=chance)
    tensors = (
        {"weight": weight, "weight_scale_inv": scales} if block else {"weight": weight, "weight_scale": scales[0, 0]}
    )
    form = Fp8Format(
        Quantization(method="fp8", block=block), Shape(outputs=outputs, inputs=inputs, inputs_of_all_ranks=inputs)
    )
    whole = scales.repeat_interleave(tall, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
    assert torch.equal(form.dense(tensors, dtype), (weight.double() * whole.double()).float().to(dtype))
