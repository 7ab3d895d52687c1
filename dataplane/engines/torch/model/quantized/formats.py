"""How the weights of a linear layer are stored packed, and what multiplies them.

Formats of published checkpoints; q are packed integers, z zero points, s scales, g(i) the group of input row i:

    awq    W[i, o] = (q - z[g(i), o]) s[g(i), o]          4 bits; eight outputs to an int32, interleaved
    gptq   W[i, o] = (q - z[g(i), o] - 1) s[g(i), o]      4 or 8 bits; 32 / bits inputs to an int32; `gptq_v2`: no - 1
           that 1 is taken from z as they lie packed, as GPTQModel does: a zero point of 0 borrows from the next one
    fp8    W[o, i] = q s[o // rows, i // columns]         E4M3 with a scale for each block, or one for the tensor

On several ranks each has whole groups, blocks and packed integers: its part of a tensor follows from its part of the
layer's weights. Where rows are in groups in any order, a rank of some rows may need any group, and has them all.

On a GPU kernels multiply the packed weights by the few rows of a decode step; the many rows of a prefill share the cost
of unpacking them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from dataplane.engines.torch.model.quantized import fp8_blocks
from dataplane.engines.torch.model.quantized.config import Quantization
from dataplane.engines.torch.model.split import Segment, Split

FEW_ROWS = 64
"""Up to so many rows the packed weights are multiplied, if there is a kernel for them."""
INT_BITS = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of an int32, from the lowest, the eight outputs are."""

Tensors = Mapping[str, torch.Tensor]
"""Of a layer, by name."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A side of a stored tensor: `size` outputs or inputs, `per` of which share an entry. `dim`: the side of the
    weights `[outputs, inputs]` with which it is divided among ranks, None: with none. `limit`: the field of
    `quantization_config` that says `per`.
    """

    size: int
    per: int = 1
    dim: int | None
    limit: str = ""

    @property
    def entries(self) -> int:
        return -(-self.size // self.per)

    def divided(self, split: Split) -> tuple[Segment, ...]:
        """Segments of entries, where the weights are divided as `split` says.

        Raises:
            ValueError: says which entries a rank would have a part of.
        """
        for segment in split.segments:
            if segment.share % self.per:
                raise ValueError(f"{segment.share} {('outputs', 'inputs')[split.dim]} are no multiple of {self.per}")
        return tuple(replace(segment, size=-(-segment.size // self.per)) for segment in split.segments)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the weights that a rank has, and the inputs of all ranks together."""

    outputs: int
    inputs: int
    inputs_of_all_ranks: int


class Format(ABC):
    """The format of a layer's weights. It holds none itself: tensors are given by name."""

    def __init__(self, quantization: Quantization, shape: Shape) -> None:
        self.quantization = quantization
        self.shape = shape

    @abstractmethod
    def sides(self) -> dict[str, tuple[Side, ...]]:
        """The tensors of a checkpoint, and their sides."""

    def kept(self, types: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """The tensors that lie in memory, empty on `meta`. `types`: of those of the checkpoint."""
        return {
            name: torch.empty([side.entries for side in sides], dtype=types[name], device="meta")
            for name, sides in self.sides().items()
        }

    @abstractmethod
    def product(self, tensors: Tensors, input: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` to `[rows, outputs]`, a new tensor."""


class StoredFormat(Format):
    """Tensors lie in memory as a checkpoint has them."""

    @abstractmethod
    def dense(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[outputs, inputs]`. Integers and zero points are exact in any dtype."""

    @abstractmethod
    def multiply_packed(
        self, tensors: Tensors, input: torch.Tensor, experts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`product` of a few rows on a GPU. `experts` `[rows]`: each row's, where the tensors are those of all."""

    def product(self, tensors: Tensors, input: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` to `[rows, outputs]`, a new tensor."""
        if input.is_cuda and len(input) <= FEW_ROWS:
            return self.multiply_packed(tensors, input)
        return linear(input, self.dense(tensors, input.dtype))

    def _outputs(self, per: int = 1, limit: str = "") -> Side:
        return Side(size=self.shape.outputs, per=per, dim=0, limit=limit)

    def _inputs(self, per: int = 1, limit: str = "") -> Side:
        return Side(size=self.shape.inputs, per=per, dim=1, limit=limit)

    def _packed(self, side: Callable[[int, str], Side]) -> Side:
        """A side whose integers are packed into int32."""
        bits = self.quantization.bits
        return side(INT_BITS // bits, f"bits={bits}")


class GroupedFormat(StoredFormat):
    """Integers with a zero point and a scale for each output of a group of inputs."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.quantization.group or self.shape.inputs

    @abstractmethod
    def integers(self, tensors: Tensors) -> torch.Tensor:
        """`[inputs, outputs]` bytes."""

    @abstractmethod
    def zeros(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The zero points `[groups, outputs]`."""

    def dense(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[outputs, inputs]`: `(q - z) s`."""
        integers, zeros = self.integers(tensors).to(dtype), self.zeros(tensors, dtype)
        scales, group = tensors["scales"].to(dtype), self.group
        if self.quantization.by_index:
            index = tensors["g_idx"]
            return integers.sub_(zeros[index]).mul_(scales[index]).t()
        whole = self.shape.inputs // group
        grouped = integers[: whole * group].view(whole, group, self.shape.outputs)
        grouped.sub_(zeros[:whole, None]).mul_(scales[:whole, None])
        integers[whole * group :].sub_(zeros[whole:]).mul_(scales[whole:])
        return integers.t()

    @property
    def _groups(self) -> Side:
        if not self.quantization.group:
            return Side(size=1, dim=None)
        limit = f"group_size={self.group}"
        if self.quantization.by_index:
            return Side(size=self.shape.inputs_of_all_ranks, per=self.group, dim=None, limit=limit)
        return self._inputs(self.group, limit)


class AwqFormat(GroupedFormat):
    """AutoAWQ's `gemm` version."""

    def sides(self) -> dict[str, tuple[Side, ...]]:
        """The tensors of a checkpoint, and their sides."""
        packed = self._packed(self._outputs)
        return {
            "qweight": (self._inputs(), packed),
            "qzeros": (self._groups, packed),
            "scales": (self._groups, self._outputs()),
        }

    def integers(self, tensors: Tensors) -> torch.Tensor:
        """`[inputs, outputs]` bytes."""
        return _awq_outputs(tensors["qweight"])

    def zeros(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The zero points `[groups, outputs]`."""
        return _awq_outputs(tensors["qzeros"]).to(dtype)

    def multiply_packed(
        self, tensors: Tensors, input: torch.Tensor, experts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`product` of a few rows on a GPU. `experts` `[rows]`: each row's, where the tensors are those of all."""
        from dataplane.engines.torch.model.quantized import kernels  # noqa: PLC0415  # Triton comes with CUDA's torch

        packed, zeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
        return kernels.awq_product(input, packed, zeros, scales, self.group, experts)


class GptqFormat(GroupedFormat):
    """AutoGPTQ's and GPTQModel's format."""

    def sides(self) -> dict[str, tuple[Side, ...]]:
        """The tensors of a checkpoint, and their sides."""
        return {
            "qweight": (self._packed(self._inputs), self._outputs()),
            "qzeros": (self._groups, self._packed(self._outputs)),
            "scales": (self._groups, self._outputs()),
            "g_idx": (self._inputs(),),
        }

    def integers(self, tensors: Tensors) -> torch.Tensor:
        """`[inputs, outputs]` bytes."""
        packed = _integers(tensors["qweight"], self.quantization.bits)
        return packed.transpose(1, 2).flatten(0, 1)[: self.shape.inputs]

    def zeros(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The zero points `[groups, outputs]`."""
        return _integers(tensors["qzeros"] + self._shift, self.quantization.bits).flatten(1).to(dtype)

    @property
    def _shift(self) -> int:
        """What is added to an int32 of zero points: 1 for each of them."""
        ones = ((1 << INT_BITS) - 1) // ((1 << self.quantization.bits) - 1)
        return ones if self.quantization.is_shifted else 0

    def multiply_packed(
        self, tensors: Tensors, input: torch.Tensor, experts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`product` of a few rows on a GPU. `experts` `[rows]`: each row's, where the tensors are those of all."""
        from dataplane.engines.torch.model.quantized import kernels  # noqa: PLC0415  # Triton comes with CUDA's torch

        return kernels.gptq_product(
            input,
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            tensors["g_idx"] if self.quantization.by_index else None,
            group=self.group,
            bits=self.quantization.bits,
            shift=self._shift,
            experts=experts,
        )


class Fp8Format(StoredFormat):
    """E4M3 weights with scales of blocks, as DeepSeek and Qwen publish them, or with one scale."""

    def sides(self) -> dict[str, tuple[Side, ...]]:
        """The tensors of a checkpoint, and their sides."""
        weight, block = (self._outputs(), self._inputs()), self.quantization.block
        if block is None:
            return {"weight": weight, "weight_scale": ()}
        limit = f"weight_block_size={list(block)}"
        return {"weight": weight, "weight_scale_inv": (self._outputs(block[0], limit), self._inputs(block[1], limit))}

    def dense(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[outputs, inputs]`. Each is rounded once: any dtype has the 8-bit numbers, and torch multiplies
        by scales in float32.
        """
        weight, (rows, columns) = tensors["weight"].to(dtype), self._block
        scales = self._scales(tensors).float().repeat_interleave(columns, dim=1)
        for number, row in enumerate(scales[:, : self.shape.inputs]):
            weight[number * rows : (number + 1) * rows].mul_(row)
        return weight

    def multiply_packed(
        self, tensors: Tensors, input: torch.Tensor, experts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`product` of a few rows on a GPU. `experts` `[rows]`: each row's, where the tensors are those of all."""
        from dataplane.engines.torch.model.quantized import kernels  # noqa: PLC0415  # Triton comes with CUDA's torch

        return kernels.fp8_product(input, tensors["weight"], self._scales(tensors), self._block, experts)

    def product(self, tensors: Tensors, input: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` to `[rows, outputs]`, a new tensor."""
        if input.is_cuda:
            return super().product(tensors, input)
        return fp8_blocks.product(input, tensors["weight"], self._scales(tensors), self._block)

    @property
    def _block(self) -> tuple[int, int]:
        return self.quantization.block or (self.shape.outputs, self.shape.inputs)

    def _scales(self, tensors: Tensors) -> torch.Tensor:
        """`[..., blocks of outputs, blocks of inputs]`."""
        if self.quantization.block is None:
            return tensors["weight_scale"][..., None, None]
        return tensors["weight_scale_inv"]


def _awq_outputs(packed: torch.Tensor) -> torch.Tensor:
    """`[rows, outputs / 8]` int32 to `[rows, outputs]` bytes."""
    places = _integers(packed, 4)
    return torch.stack([places[..., place] for place in _AWQ_PLACES], dim=-1).flatten(1)


def _integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """`[rows, columns]` int32 to `[rows, columns, 32 / bits]` bytes, from the lowest bits on. Bytes are a quarter of
    what shifted int32 would read and write.
    """
    in_bytes = packed.contiguous().view(torch.uint8).view(*packed.shape, INT_BITS // 8)
    return in_bytes if bits == 8 else torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(2)
