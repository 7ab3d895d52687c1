"""A model's layers replaced by quantized ones, where its checkpoint holds their weights quantized."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.engines.torch.model.checkpoint import DTYPES
from dataplane.engines.torch.model.expert_names import EXPERTS, expert_names
from dataplane.engines.torch.model.quantized import int4_cpu
from dataplane.engines.torch.model.quantized.config import Method, Quantization
from dataplane.engines.torch.model.quantized.formats import (
    INT_BITS,
    AwqFormat,
    Format,
    Fp8Format,
    GptqFormat,
    GroupedFormat,
    Shape,
    StoredFormat,
)
from dataplane.engines.torch.model.quantized.layers import ExpertStack, QuantizedExperts, QuantizedLinear
from dataplane.engines.torch.model.split import Split
from dataplane.protocol.errors import ModelLoadError

FORMAT_OF: Mapping[Method, type[StoredFormat]] = {"awq": AwqFormat, "gptq": GptqFormat, "fp8": Fp8Format}
_STORED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), ("I32",)),
    "weight": ("F8_E4M3",),
    **dict.fromkeys(("scales", "weight_scale", "weight_scale_inv"), ("F32", "F16", "BF16")),
}
"""The types that a layer's tensors may have."""


@dataclass(eq=False, kw_only=True)
class Replacement:
    """What is replaced in a model of `folder`, or another source. `stored`: the checkpoint's tensors, `splits`: how
    weights are divided among ranks, `made`: how the tensors are that hold them instead, all by name.
    """

    folder: Path | str
    quantization: Quantization
    stored: Mapping[str, StoredTensor]
    splits: Mapping[str, Split]
    repacks: Callable[[Format], bool]
    made: dict[str, Split] = field(default_factory=dict)

    def linear(self, prefix: str, module: torch.nn.Linear) -> QuantizedLinear:
        """What replaces a linear layer."""
        split = self.splits.get(f"{prefix}.weight")
        form = self._form(prefix, (module.out_features, module.in_features), split)
        self.made |= self._tensor_splits(prefix, prefix, form, split)
        return QuantizedLinear(self._kept(form), self._types(prefix), module.bias)

    def experts(self, prefix: str, module: Any) -> QuantizedExperts:
        """What replaces the experts of a layer, all of which are quantized."""
        count, inner, hidden = len(module.down_proj), module.down_proj.shape[2], module.down_proj.shape[1]
        stacks = {}
        for number, projection in enumerate(EXPERTS):
            is_down = projection == "down_proj"
            whole = self.splits.get(f"{prefix}.{'down_proj' if is_down else 'gate_up_proj'}")
            segments = () if whole is None else whole.segments[0 if is_down else number :][:1]
            split = None if whole is None else replace(whole, dim=whole.dim - 1, segments=segments)
            first = self._known(expert_names(prefix, projection, 0))
            form = self._form(first, (hidden, inner) if is_down else (inner, hidden), split)
            splits = self._tensor_splits(first, f"{prefix}.{projection}", form, split)
            self.made |= {name: replace(one, dim=one.dim + 1) for name, one in splits.items()}
            stacks[projection] = ExpertStack(self._kept(form), self._types(first), count)
        return QuantizedExperts(stacks, module.act_fn)

    def quantized(self) -> set[str]:
        """The names of the layers whose weights are stored quantized."""
        if self.quantization.method != "fp8":
            return {name.removesuffix(".qweight") for name in self.stored if name.endswith(".qweight")}
        end, eights = ".weight", {name for name, one in self.stored.items() if one.dtype == "F8_E4M3"}
        return {name.removesuffix(end) for name in eights if name.endswith(end)}

    def _known(self, names: tuple[str, ...]) -> str:
        """The one of a layer's names by which the checkpoint has it."""
        end = "weight" if self.quantization.method == "fp8" else "qweight"
        return next(name for name in names if f"{name}.{end}" in self.stored)

    def _form(self, prefix: str, sizes: tuple[int, int], split: Split | None) -> StoredFormat:
        """`sizes`: outputs and inputs of a rank's weights."""
        (outputs, inputs), quantization = sizes, self.quantization
        all_outputs = split.size if split is not None and split.dim == 0 else outputs
        per = INT_BITS // quantization.bits
        if quantization.method != "fp8" and all_outputs % per:
            wrong = f"its {all_outputs} outputs are no multiple of {per}"
            raise ModelLoadError(f"{self.folder}: {prefix} cannot be quantized in {quantization.bits} bits: {wrong}")
        all_inputs = split.size if split is not None and split.dim == 1 else inputs
        shape = Shape(outputs=outputs, inputs=inputs, inputs_of_all_ranks=all_inputs)
        return FORMAT_OF[quantization.method](quantization, shape)

    def _kept(self, form: StoredFormat) -> Format:
        if self.repacks(form) and isinstance(form, GroupedFormat):
            return int4_cpu.Int4CpuFormat(form)
        return form

    def _tensor_splits(self, layer: str, prefix: str, form: Format, split: Split | None) -> dict[str, Split]:
        """How a layer's tensors are divided, by name after `prefix`, where its weights are divided as `split` says."""
        made: dict[str, Split] = {}
        if split is None:
            return made
        for name, sides in form.sides().items():
            for number, side in enumerate(sides):
                if side.dim == split.dim:
                    try:
                        made[f"{prefix}.{name}"] = replace(split, dim=number, segments=side.divided(split))
                    except ValueError as error:
                        raise ModelLoadError(
                            f"{self.folder}: {layer} cannot be divided among {split.ranks} GPUs: the {error}, which"
                            f" quantization_config.{side.limit} keeps together"
                        ) from error
        return made

    def _types(self, prefix: str) -> Mapping[str, torch.dtype]:
        """Of a layer's tensors, as they are stored. One that is missing is reported by whoever reads them."""
        types = defaultdict(lambda: torch.float32)
        for name, allowed in _STORED.items():
            found = self.stored.get(f"{prefix}.{name}")
            if found is not None and found.dtype not in allowed:
                supported = " or ".join(allowed)
                raise ModelLoadError(f"{found.file}: {found.name} has dtype {found.dtype}; supported is {supported}")
            if found is not None:
                types[name] = DTYPES[found.dtype]
        return types


def quantize(
    folder: Path | str,
    model: torch.nn.Module,
    quantization: Quantization,
    stored: Mapping[str, StoredTensor],
    splits: Mapping[str, Split],
    repacks: Callable[[Format], bool],
) -> dict[str, Split]:
    """Replace the linear layers and experts whose weights the checkpoint holds quantized. The others, often the output
    embedding, stay as they are. `splits`: how weights are divided among ranks, by name; `repacks`: whether a format's
    tensors are to be kept as a CPU's products want them. Returns the splits of the tensors that hold the weights.

    Raises:
        ModelLoadError: a layer cannot be divided as its format demands, has tensors of a type that is not supported,
            or is neither a linear layer nor one of its layer's experts, all of which are quantized.
    """
    work = Replacement(folder=folder, quantization=quantization, stored=stored, splits=splits, repacks=repacks)
    left = work.quantized()
    for prefix, module in list(model.named_modules()):
        parent, _, name = prefix.rpartition(".")
        if prefix in left and type(module) is torch.nn.Linear:
            left.remove(prefix)
            model.get_submodule(parent).register_module(name, work.linear(prefix, module))
        elif name == "experts" and _are_quantized(folder, prefix, module, left):
            model.get_submodule(parent).register_module(name, work.experts(prefix, module))
    if left:
        raise ModelLoadError(
            f"{folder}: {min(left)} is quantized, which is supported of linear layers and experts only"
        )
    return work.made


def _are_quantized(folder: Path | str, prefix: str, module: Any, left: set[str]) -> bool:
    """Whether the experts of a layer are quantized. Their names are then taken out of `left`."""
    wanted = [
        expert_names(prefix, projection, expert) for expert in range(len(module.down_proj)) for projection in EXPERTS
    ]
    dense = [names[0] for names in wanted if left.isdisjoint(names)]
    if len(dense) == len(wanted):
        return False
    if dense:
        raise ModelLoadError(f"{folder}: {dense[0]} is not quantized, but other experts of its layer are")
    left.difference_update(name for names in wanted for name in names)
    return True
