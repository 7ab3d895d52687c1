from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from dataplane.engines.torch.model.linear import (
    FastLinear,
    FirstLinear,
    NextLinear,
    _has_fast_mkl,
    merge_products,
    product,
    speed_up,
)

INPUTS, OUTPUTS = 24, {"q_proj": 40, "k_proj": 8, "v_proj": 16}


class Attention(torch.nn.Module):
    """Layers with one input, whose weights are one tensor, with so many numbers between them."""

    def __init__(self, *, apart: int = 0, bias: bool = False) -> None:
        super().__init__()
        sizes = [INPUTS * outputs + apart for outputs in OUTPUTS.values()]
        numbers = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
        self.starts_bytes = {}
        for (name, outputs), start in zip(OUTPUTS.items(), accumulate(sizes, initial=0), strict=False):
            layer = torch.nn.Linear(INPUTS, outputs, bias=bias)
            weight = numbers[start : start + INPUTS * outputs].view(outputs, INPUTS)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.add_module(name, layer)
            self.starts_bytes[f"self_attn.{name}.weight"] = start * numbers.itemsize

    @property
    def kinds(self) -> list[type[torch.nn.Module]]:
        return [type(layer) for layer in self.children()]


def merged(attention: Attention) -> Attention:
    model = torch.nn.ModuleDict({"self_attn": attention})
    speed_up(model)
    merge_products(model, attention.starts_bytes)
    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (1, 300), (5,), (2, 3)])
def test_a_product_is_that_of_a_linear_layer(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, INPUTS).to(dtype), torch.randn(40, INPUTS).to(dtype)
    with_bias = torch.randn(40).to(dtype) if bias else None
    torch.testing.assert_close(product(x, weight, with_bias), linear(x, weight, with_bias))


def test_without_onednn_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, INPUTS), torch.randn(40, INPUTS)
    monkeypatch.setattr("dataplane.engines.torch.model.linear.HAS_ONEDNN", False)
    assert torch.equal(product(x, weight), linear(x, weight))


@pytest.mark.parametrize("fast_mkl", [False, True])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 2048), (3, 2048), (4, 2048), (1, 1024), (4, 1024), (64, 640)])
def test_mkl_multiplies_few_rows_or_inputs_where_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, rows: int, inputs: int, fast_mkl: bool
) -> None:
    """And oneDNN the rest."""
    x, weight = torch.randn(1, rows, inputs), torch.randn(8, inputs)
    by_mkl = []

    def counted(*given: torch.Tensor) -> torch.Tensor:
        by_mkl.append(given)
        return linear(*given)

    monkeypatch.setattr("dataplane.engines.torch.model.linear.HAS_ONEDNN", True)
    monkeypatch.setattr("dataplane.engines.torch.model.linear.HAS_FAST_MKL", fast_mkl)
    monkeypatch.setattr("dataplane.engines.torch.model.linear.linear", counted)
    torch.testing.assert_close(product(x, weight), linear(x, weight), atol=1e-3, rtol=1e-3)
    assert len(by_mkl) == (fast_mkl and (rows <= 3 or inputs < 1024))


@pytest.mark.parametrize(
    ("text", "expected"), [("vendor_id\t: GenuineIntel", True), ("AuthenticAMD", False), (None, False)]
)
def test_mkl_is_fast_on_an_intel_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr("dataplane.engines.torch.model.linear._CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert _has_fast_mkl() == expected


@pytest.mark.parametrize("rows", [1, 5])
def test_merged_layers_compute_what_each_would(rows: int) -> None:
    attention: Any = merged(Attention())
    assert attention.kinds == [FirstLinear, NextLinear, NextLinear]
    for _ in range(2):
        x = torch.randn(1, rows, INPUTS)
        for layer in attention.children():
            torch.testing.assert_close(layer(x), linear(x, layer.weight))


def test_a_forward_pass_that_failed_leaves_nothing_to_the_next() -> None:
    attention: Any = merged(Attention())
    attention.q_proj(torch.randn(1, 2, INPUTS))
    x = torch.randn(1, 2, INPUTS)
    made = [layer(x) for layer in attention.children()]
    torch.testing.assert_close(made, [linear(x, layer.weight) for layer in attention.children()])


@pytest.mark.parametrize("attention", [Attention(apart=1), Attention(bias=True)], ids=["apart", "biases"])
def test_layers_that_cannot_be_read_as_one_are_not_merged(attention: Attention) -> None:
    assert merged(attention).kinds == [FastLinear] * 3


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Own(2, 2))
    speed_up(model)
    assert type(model[0]) is Own
