"""Fused norms are the norms of transformers' models."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dataplane.engines.torch.model.norms import FusedRMSNorm, fuse_norms
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, tiny_config

OTHERS = {"gemma2", "gemma3_text", "cohere2", "starcoder2"}
"""Those with norms of another kind."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fused_norm_computes_what_its_model_does(architecture: str, dtype: torch.dtype) -> None:
    build: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    model = build(tiny_config(architecture), dtype=dtype)
    theirs = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    inputs, expected = {}, {}
    with torch.inference_mode():
        for name, module in theirs.items():
            module.weight.uniform_(0.5, 1.5)
            inputs[name] = torch.randn(1, 5, module.weight.shape[0]).to(dtype)
            expected[name] = module(inputs[name])
        fuse_norms(model)
        for name, module in theirs.items():
            torch.testing.assert_close(module(inputs[name]), expected[name])
    fused = {name for name, module in theirs.items() if type(module) is FusedRMSNorm}
    assert fused == (set() if architecture in OTHERS else set(theirs))
