"""The products of packed weights against those of unpacked ones. Without a GPU Triton interprets the kernels."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dataplane.engines.torch.model.quantized.config import Quantization
from dataplane.engines.torch.model.quantized.formats import AwqFormat, Fp8Format, GptqFormat, Shape, StoredFormat
from dataplane.engines.torch.model.quantized.layers import ExpertStack, QuantizedExperts
from tests.dataplane.engines.torch.model.packing import Pack, awq, fp8, gptq

kernels = pytest.importorskip(
    "dataplane.engines.torch.model.quantized.kernels",
    reason="Triton comes with CUDA builds of torch: make test-kernels",
    exc_type=ModuleNotFoundError,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Made = tuple[dict[str, torch.Tensor], torch.Tensor, StoredFormat]


def _gptq(bits: int, group: int, **changes: bool) -> tuple[Quantization, Pack]:
    by_index, shifted, positive = (changes.get(name, name == "shifted") for name in ("by_index", "shifted", "positive"))
    meant = Quantization(method="gptq", bits=bits, group=group, is_shifted=shifted, by_index=by_index)
    return meant, gptq(bits, group or 10**6, shuffled=by_index, shift=int(shifted), positive=positive)


CASES: dict[str, tuple[type[StoredFormat], Quantization, Pack]] = {
    "gptq": (GptqFormat, *_gptq(4, 128)),
    "gptq, small groups": (GptqFormat, *_gptq(4, 32)),
    "gptq, groups that cut an int32": (GptqFormat, *_gptq(4, 20)),
    "gptq, one group": (GptqFormat, *_gptq(4, 0)),
    "gptq_v2": (GptqFormat, *_gptq(4, 64, shifted=False)),
    "gptq, 8 bits": (GptqFormat, *_gptq(8, 64, positive=True)),
    "gptq, zero points of 0": (GptqFormat, *_gptq(4, 64, positive=True)),
    "gptq, by activations": (GptqFormat, *_gptq(4, 32, by_index=True)),
    "awq": (AwqFormat, Quantization(method="awq", bits=4, group=64), awq(64)),
    "awq, small groups": (AwqFormat, Quantization(method="awq", bits=4, group=16), awq(16)),
    "awq, one group": (AwqFormat, Quantization(method="awq", bits=4), awq(10**6)),
    "fp8, blocks": (Fp8Format, Quantization(method="fp8", block=(64, 128)), fp8((64, 128))),
    "fp8, small blocks": (Fp8Format, Quantization(method="fp8", block=(24, 20)), fp8((24, 20))),
    "fp8, a scale for each output": (Fp8Format, Quantization(method="fp8", block=(1, 10**6)), fp8((1, 10**6))),
    "fp8, one scale": (Fp8Format, Quantization(method="fp8"), fp8(None)),
}


def made(case: str, outputs: int, inputs: int, seed: int = 0) -> Made:
    """A layer's tensors, the weights that they stand for, and their format."""
    kind, quantization, pack = CASES[case]
    weights = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    weights[0] *= 1e-5  # some numbers of FP8 have no exponent then
    tensors, dense = pack(weights)
    shape = Shape(outputs=outputs, inputs=inputs, inputs_of_all_ranks=inputs)
    return {name: one.contiguous() for name, one in tensors.items()}, torch.from_numpy(dense), kind(quantization, shape)


def on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.to(DEVICE) for name, one in tensors.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 72, 160), (19, 128, 256)])
def test_packed_weights_are_multiplied_as_unpacked_ones(case: str, rows: int, outputs: int, inputs: int) -> None:
    """Sizes that tiles divide, and others."""
    tensors, dense, form = made(case, outputs, inputs)
    rows_in = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    out = form.multiply_packed(on_device(tensors), rows_in.to(DEVICE)).cpu()
    assert torch.allclose(out, rows_in @ dense.T, atol=2e-4, rtol=1e-5)
    assert torch.allclose(form.dense(tensors, torch.float32), dense, atol=1e-5), "the test's own weights are others"


def test_half_precision_is_summed_in_float32() -> None:
    """Triton interprets no bfloat16."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    tensors, dense, form = made("gptq", 64, 512)
    rows_in = torch.randn(3, 512).to(dtype)
    out = form.multiply_packed(on_device(tensors), rows_in.to(DEVICE)).cpu()
    assert out.dtype == dtype
    exact = rows_in.double() @ dense.double().T
    assert (out.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("case", ["gptq", "gptq, by activations", "awq", "fp8, blocks", "fp8, one scale"])
def test_each_row_is_multiplied_by_its_own_experts_weights(case: str) -> None:
    ones = [made(case, 64, 128, seed) for seed in range(3)]
    form = ones[0][2]
    stacked = on_device({name: torch.stack([tensors[name] for tensors, _, _ in ones]) for name in ones[0][0]})
    rows_in, experts = torch.randn(5, 128), torch.tensor([2, 0, 1, 2, 2])
    out = form.multiply_packed(stacked, rows_in.to(DEVICE), experts.to(DEVICE)).cpu()
    expected = torch.stack([row @ ones[expert][1].T for row, expert in zip(rows_in, experts.tolist(), strict=True)])
    assert torch.allclose(out, expected, atol=2e-4, rtol=1e-5)


def test_few_pairs_give_what_expert_by_expert_gives() -> None:
    """One of the experts is nobody's."""
    stacks = {}
    for seed, (name, outputs, inputs) in enumerate(
        (("gate_proj", 64, 128), ("up_proj", 64, 128), ("down_proj", 128, 64))
    ):
        ones = [made("gptq, small groups", outputs, inputs, 4 * seed + expert) for expert in range(4)]
        tensors = on_device({one: torch.stack([part[0][one] for part in ones]) for one in ones[0][0]})
        stacks[name] = ExpertStack(ones[0][2], {one: tensor.dtype for one, tensor in tensors.items()}, 4)
        for one, tensor in tensors.items():
            stacks[name].register_parameter(one, torch.nn.Parameter(tensor, requires_grad=False))
    experts = QuantizedExperts(stacks, torch.nn.SiLU())
    states = torch.randn(3, 128).to(DEVICE) / 100
    chosen = torch.tensor([3, 0, 0, 2, 3, 2]).to(DEVICE)
    with torch.inference_mode():
        few = experts._of_few(states.repeat_interleave(2, dim=0), chosen)
        each = experts._expert_by_expert(states, chosen, 2)
    assert torch.allclose(few, each, rtol=1e-4, atol=1e-5 * float(each.abs().max()))
    assert each.abs().max() > 0


@pytest.mark.parametrize(
    ("programs", "tiles", "splits"), [(1, 64, 16), (1, 3, 2), (1, 1, 1), (64, 32, 8), (200, 32, 2), (264, 32, 1)]
)
def test_inputs_are_divided_until_the_gpu_is_full(programs: int, tiles: int, splits: int) -> None:
    assert kernels.splits_of(programs, tiles) == splits


COMPILES = """
import inspect
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dataplane.engines.torch.model.quantized import kernels

POINTERS = {"packed": "*i32", "zeros": "*i32", "index": "*i32", "experts": "*i64", "scales": "*fp16", "input": "*bf16"}

def shared_bytes(kernel, out, **constants):
    names = inspect.signature(kernel.fn).parameters
    constants |= {"tile_outputs": kernels.TILE_OUTPUTS, "precision": "tf32"}
    types = {name: POINTERS.get(name, "i32") for name in names} | {"out": out}
    if kernel is kernels._fp8_kernel:
        types |= {"packed": "*u8", "scales": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3}).metadata.shared

for tile_rows, out, flag in ((16, "*fp32", False), (64, "*bf16", False), (16, "*bf16", True)):
    sizes = {"out": out, "tile_rows": tile_rows, "has_experts": flag}
    for bits, by_index, one_group in ((4, False, True), (8, False, False), (4, True, False)):
        print(shared_bytes(
            kernels._gptq_kernel, shift=0x11111111, bits=bits, by_index=by_index, one_group=one_group,
            word_in_group=not by_index, tile=kernels.TILE_WORDS, **sizes,
        ), end=" ")
    for one_group in (True, False):
        print(shared_bytes(kernels._awq_kernel, one_group=one_group, tile=kernels.TILE_INPUTS, **sizes), end=" ")
        print(shared_bytes(kernels._fp8_kernel, one_group=one_group, tile=kernels.TILE_INPUTS, **sizes), end=" ")
"""


def numbers_of(program: str) -> list[int]:
    """What a program prints, in which Triton interprets nothing."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [int(word) for word in ended.stdout.split()]


def test_kernels_compile_for_a_hopper_gpu() -> None:
    """Interpreted kernels may do what compiled ones may not. Compiling needs no GPU."""
    shared = numbers_of(COMPILES)
    assert len(shared) == 21
    assert max(shared) <= 227 * 1024, "more shared memory than a multiprocessor of a Hopper GPU has"


LAUNCHES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from dataplane.engines.torch.model.quantized import kernels
from tests.dataplane.engines.torch.model.quantized.test_kernels import made

class Launches:
    def __init__(self, kernel):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: compiled.add(repr(self.bind(*arguments, **constants)[1:]))

for kind in ("gptq", "awq", "fp8"):
    setattr(kernels, f"_{kind}_kernel", Launches(getattr(kernels, f"_{kind}_kernel")))
for case in ("gptq", "awq", "fp8, blocks"):
    tensors, _, form = made(case, 512, 256)
    for rows_max, has_experts in ((16, False), (64, False), (256, True)):
        compiled = set()
        for rows in range(1, rows_max + 1):
            experts = torch.zeros(rows, dtype=torch.int64) if has_experts else None
            form.multiply_packed(tensors, torch.empty(rows, 256, dtype=torch.bfloat16), experts)
        print(len(compiled), end=" ")
"""


def test_numbers_of_rows_share_compiled_kernels() -> None:
    """One of each size of tile; with experts one that writes what is added, and one that writes the result."""
    assert numbers_of(LAUNCHES) == [1, 3, 2] * 3
