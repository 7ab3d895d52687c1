"""A quantized model beside the same model in bfloat16: the time of a switch to it, and of its linear layers.

Weights are random: neither time depends on their values. A switch moves fewer bytes. A step of a few tokens multiplies
them packed; FP8 is unpacked on a CPU, some rows at a time.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from dataplane.engines.torch.memory.host_models import HostModel
from dataplane.engines.torch.model.quantized.config import read_quantization
from dataplane.engines.torch.model.quantized.formats import Shape
from dataplane.engines.torch.model.quantized.layers import QuantizedLinear
from dataplane.engines.torch.model.quantized.replace import FORMAT_OF
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.profiling.checkpoints import BenchModel, build_checkpoints, parameters_of, shape_of
from ops.profiling.figures import interleaved, medians, seconds
from ops.profiling.switch import BenchSlot, open_slot

GROUP = 128
SWITCH_MAX = 0.35
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}


def _gptq(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    groups = -(-inputs // GROUP)
    return {
        "qweight": torch.randint(2**31 - 1, (inputs // 8, outputs), dtype=torch.int32),
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, outputs), 0.004, dtype=torch.float16),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def _fp8(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(outputs, inputs).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full((-(-outputs // GROUP), -(-inputs // GROUP)), 0.02),
    }


FORMATS = {"gptq, 4 bits": (_GPTQ, _gptq), "fp8": (_FP8, _fp8)}


def quantized(dense: BenchModel, form: str, target: Path) -> BenchModel:
    """A checkpoint of the same shape with quantized linear layers."""
    config, pack = FORMATS[form]
    copytree(dense.folder, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer = tensors.pop(name)
        tensors |= {name.removesuffix("weight") + part: made for part, made in pack(*layer.shape).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    weights_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return BenchModel(name=target.name, folder=target, weights_bytes=weights_bytes)


def layer_of(config: dict[str, Any], tensors: dict[str, torch.Tensor], outputs: int, inputs: int) -> QuantizedLinear:
    """A layer of such tensors, as a GPU has it."""
    found = read_quantization(Path(), {"quantization_config": config})
    assert found is not None
    form = FORMAT_OF[found.method](found, Shape(outputs=outputs, inputs=inputs, inputs_of_all_ranks=inputs))
    layer = QuantizedLinear(form, {name: tensor.dtype for name, tensor in tensors.items()}, None)
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return layer


def measure(dense: BenchModel, form: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Switches between the two in an arena that holds one, and a layer on one token, by turns."""
    small = quantized(dense, form, folder / form.partition(",")[0])
    pair = {"dense": dense, "quantized": small}
    with open_slot(list(pair.values()), device="cpu", dtype="bfloat16", residents=1) as slot:
        models = dict(zip(pair, slot.models, strict=True))
        turns = {name: partial(seconds, partial(slot.switch, one), slot.device) for name, one in models.items()}
        switches = medians(interleaved(turns, rounds=rounds))
        sizes = {name: one.skeleton.size_bytes for name, one in models.items()}
        layers = {name: _layer_run(slot, one) for name, one in models.items()}
        steps = medians(interleaved(layers, rounds=rounds))
    return {
        "format": form,
        "bytes": sizes["quantized"] / sizes["dense"],
        "switch": switches["quantized"] / switches["dense"],
        "step": steps["quantized"] / steps["dense"],
    }


def _layer_run(slot: BenchSlot, model: HostModel) -> Callable[[], float]:
    """Seconds of the linear layers of a model's first layer, on one token."""
    linear = [
        one for name, one in model.skeleton.model.named_modules() if ".layers.0." in name and name.endswith("_proj")
    ]

    def run() -> None:
        with torch.inference_mode():
            for one in linear:
                one(torch.ones(1, one.in_features, dtype=torch.bfloat16))

    def timed_s() -> float:
        slot.switch(model)
        run()
        return seconds(run, slot.device)

    return timed_s


def main(
    model: Annotated[str, typer.Option(help="Parameters, as 90M or 7B.")] = "300M",
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure; medians are told.")] = 5,
    as_json: AsJson = False,
) -> None:
    """The bytes and the time of a switch, and the time of a layer's products on one token, over those in bfloat16.

    \b
    Example:
      python -m ops.bench.engine.quantized --model 500M --rounds 9
    """
    try:
        shape = shape_of(parameters_of(model))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error
    rows = []
    with work_folder() as folder:
        (dense,) = build_checkpoints(folder, [shape], "bfloat16")
        for form in FORMATS:
            notes().print(f"{form}: {rounds} rounds")
            rows.append(measure(dense, form, folder, rounds))
    if as_json:
        print_json(rows)
        return
    columns: Columns = {
        "format": "format",
        "bytes": lambda row: f"{row['bytes']:.2f}x",
        f"switch (goal {SWITCH_MAX}x)": lambda row: f"{row['switch']:.2f}x",
        "linear layers, one token": lambda row: f"{row['step']:.1f}x",
    }
    print_table("A quantized model over itself in bfloat16, CPU", columns, rows)


if __name__ == "__main__":
    typer.run(main)
