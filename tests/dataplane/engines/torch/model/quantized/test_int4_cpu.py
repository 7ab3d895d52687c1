"""Four bits on a CPU: the layout is torch's own, and products are those of the unpacked weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.quantized.config import Quantization
from dataplane.engines.torch.model.quantized.formats import AwqFormat, GptqFormat, GroupedFormat, Shape
from dataplane.engines.torch.model.quantized.int4_cpu import PACKED_ROWS, Int4CpuFormat, block_outputs, can_repack
from dataplane.engines.torch.model.quantized.layers import PackedWeights
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.model.packing import AWQ, GPTQ, Pack, awq, gptq, quantized_pair
from tests.dataplane.engines.torch.rank_engines import engine_of
from tests.dataplane.engines.torch.tiny import save_tiny, spec_of

pytestmark = pytest.mark.skipif(block_outputs() is None, reason="torch has no layout of blocks for this CPU")
CPU = torch.device("cpu")
OUTPUTS, INPUTS = 192, 256
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "moe_intermediate_size": 128}
"""Of which each of two ranks has whole groups of 32 and blocks of 64."""
PACKS: dict[str, tuple[type[GroupedFormat], Quantization, Pack]] = {
    "awq": (AwqFormat, Quantization(method="awq", bits=4, group=64), awq(64)),
    "gptq": (GptqFormat, Quantization(method="gptq", bits=4, group=32, is_shifted=True), gptq(4, 32)),
    "gptq, zero points of 0": (
        GptqFormat,
        Quantization(method="gptq", bits=4, group=32, is_shifted=True),
        gptq(4, 32, positive=True),
    ),
    "gptq, by activations": (
        GptqFormat,
        Quantization(method="gptq", bits=4, group=32, is_shifted=True, by_index=True),
        gptq(4, 32, shuffled=True),
    ),
    "gptq, one group": (GptqFormat, Quantization(method="gptq", bits=4, is_shifted=True), gptq(4, INPUTS)),
}


def repacked(name: str) -> tuple[Int4CpuFormat, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A format, its tensors, the integers `[outputs, inputs]` and the weights that they stand for."""
    kind, quantization, pack = PACKS[name]
    tensors, dense = pack(np.random.default_rng(3).normal(size=(OUTPUTS, INPUTS)).astype(np.float32))
    source = kind(quantization, Shape(outputs=OUTPUTS, inputs=INPUTS, inputs_of_all_ranks=INPUTS))
    assert can_repack(source, torch.bfloat16, CPU)
    form = Int4CpuFormat(source)
    kept = {one: torch.empty_like(empty, device=CPU) for one, empty in form.kept({}).items()}
    form.repack(tensors, kept)
    integers = source.integers(tensors)
    if "order" in kept:
        integers = integers[tensors["g_idx"].argsort(stable=True)]
    return form, kept, integers.t(), torch.from_numpy(dense)


@pytest.mark.parametrize("name", PACKS)
def test_the_layout_is_that_of_torchs_own_conversion(name: str) -> None:
    _, kept, integers, _ = repacked(name)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.int().contiguous(), 1)
    assert torch.equal(kept["packed"].flatten(), theirs.flatten())


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("rows", [1, 7, PACKED_ROWS, PACKED_ROWS + 1, 150])
def test_products_are_those_of_unpacked_weights(name: str, rows: int) -> None:
    """To within what bfloat16 makes of the unpacked weights, and half as much again."""
    form, kept, _, dense = repacked(name)
    rows_in = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    exact = rows_in.double() @ dense.double().T
    unpacked = linear(rows_in, dense.bfloat16()).double()
    out = form.product(kept, rows_in).double()
    assert (out - exact).norm() < 1.5 * (unpacked - exact).norm()


def test_rows_may_be_views_of_wider_ones() -> None:
    form, kept, _, _ = repacked("awq")
    wide = torch.randn(7, 2 * INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = wide[:, :INPUTS]
    assert torch.equal(form.product(kept, rows), form.product(kept, rows.contiguous()))


@pytest.mark.parametrize(
    ("changes", "outputs", "dtype", "device"),
    [
        ({}, 192, torch.float32, "cpu"),
        ({}, 192, torch.bfloat16, "cuda"),
        ({}, 72, torch.bfloat16, "cpu"),
        ({"group": 16}, 192, torch.bfloat16, "cpu"),
        ({"group": 64, "inputs": 96}, 192, torch.bfloat16, "cpu"),
        ({"bits": 8}, 192, torch.bfloat16, "cpu"),
        ({"by_index": True, "inputs_of_all_ranks": 256}, 192, torch.bfloat16, "cpu"),
    ],
)
def test_what_torchs_product_does_not_take_stays_as_it_is(
    changes: dict[str, int], outputs: int, dtype: torch.dtype, device: str
) -> None:
    given = {"bits": 4, "group": 32, "inputs": 128, **changes}
    inputs = given.pop("inputs")
    shape = Shape(outputs=outputs, inputs=inputs, inputs_of_all_ranks=given.pop("inputs_of_all_ranks", inputs))
    source = GptqFormat(Quantization(method="gptq", **given), shape)  # type: ignore[arg-type]
    assert not can_repack(source, dtype, torch.device(device))


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        (1, r"g_idx puts 33 inputs into group 1, quantization_config\.group_size is 32"),
        (4, r"g_idx puts an input into group 4; the groups are 0 to 3"),
        (-1, r"g_idx puts an input into group -1; the groups are 0 to 3"),
    ],
)
def test_groups_of_other_numbers_or_sizes_than_the_config_says_are_refused(
    group: int, wrong: str, tmp_path: Path
) -> None:
    dense = save_tiny("llama", tmp_path / "dense", **SIZES)
    config = GPTQ | {"group_size": 32, "desc_act": True}
    quantized, _ = quantized_pair(dense, tmp_path, config, gptq(4, 32, shuffled=True))
    tensors = load_file(quantized / "model.safetensors")
    index = tensors["model.layers.2.mlp.up_proj.g_idx"]
    index[(index == 3).nonzero()[0]] = group
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2**22, kv_bytes=2**18, dtype="bfloat16"), lambda: 0.0)
    with pytest.raises(ModelLoadError, match=rf"layers\.2\.mlp\.up_proj: {wrong}"):
        engine.load("a", spec_of("a", quantized))


def states(engine: TorchEngine, folder: Path) -> torch.Tensor:
    """Of the last tokens of two prompts: one that packed weights multiply, and one that unpacked ones do."""
    engine.load("a", replace(spec_of(folder.name, folder), task="embed"))
    for length in (5, PACKED_ROWS + 10):
        prompt = [(7 * at + length) % 90 for at in range(length)]
        engine.add(request(f"r{length}", prompt, max_tokens=1, pooling=True))
    values = drain(engine).values
    engine.unload("a")
    engine.close()
    return torch.tensor([values["r5"], values[f"r{PACKED_ROWS + 10}"]])


@pytest.mark.parametrize("architecture", ["llama", "internlm3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (AWQ | {"group_size": 32}, awq(32)),
        (GPTQ | {"group_size": 32}, gptq(4, 32)),
        (GPTQ | {"group_size": 32, "desc_act": True}, gptq(4, 32, shuffled=True)),
    ],
)
def test_the_states_of_a_repacked_model_are_those_of_its_unpacked_weights(
    config: dict[str, object], pack: Pack, architecture: str, tmp_path: Path
) -> None:
    """To within three times what bfloat16 makes of these, also on two ranks: routers may choose another expert."""
    dense = save_tiny(architecture, tmp_path / "dense", **SIZES)
    quantized, meant = quantized_pair(dense, tmp_path, config, pack)
    modules = build_skeleton(quantized, torch.bfloat16, CPU).model.modules()
    packed = [one for one in modules if isinstance(one, PackedWeights)]
    assert packed != []
    assert all(layer.is_repacked for layer in packed)
    sizes = {"weights_bytes": 2**22, "kv_bytes": 2**18, "prefill_tokens_per_step_max": 128}
    halves = TorchEngineSettings(**sizes, dtype="bfloat16")
    exact = states(TorchEngine(TorchEngineSettings(**sizes), lambda: 0.0), meant)
    bound = 3 * (states(TorchEngine(halves, lambda: 0.0), meant) - exact).norm()
    assert (states(TorchEngine(halves, lambda: 0.0), quantized) - exact).norm() < bound
    ranks = engine_of(2, tmp_path / "models", **sizes, dtype="bfloat16")
    assert (states(ranks, quantized) - exact).norm() < bound


def test_a_host_copy_is_made_anew_where_the_config_says_otherwise(tmp_path: Path) -> None:
    """The files stay as they are; zero points mean something else."""
    dense = save_tiny("llama", tmp_path / "dense", **SIZES)
    quantized, _ = quantized_pair(dense, tmp_path, GPTQ | {"group_size": 32}, gptq(4, 32))
    sizes = {"weights_bytes": 2**22, "kv_bytes": 2**18, "prefill_tokens_per_step_max": 128}

    def states_of(cache: Path) -> torch.Tensor:
        settings = TorchEngineSettings(**sizes, dtype="bfloat16", cache_folder=cache)
        return states(TorchEngine(settings, lambda: 0.0), quantized)

    before = states_of(tmp_path / "models")
    file = quantized / "config.json"
    described = json.loads(file.read_text())
    described["quantization_config"]["checkpoint_format"] = "gptq_v2"
    file.write_text(json.dumps(described))
    after = states_of(tmp_path / "models")
    assert not torch.equal(after, before)
    assert torch.equal(after, states_of(tmp_path / "others"))
