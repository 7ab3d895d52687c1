"""Four bits on a CPU, repacked for torch's own product when a checkpoint is read.

torch multiplies bfloat16 by integers of 4 bits as they lie in cache lines (`_weight_int4pack_mm_for_cpu`): a block of
outputs, as many as 4 registers hold, side by side for each input, the first half of them in the low 4 bits. So one
token reads a quarter of the bytes of bfloat16. With many rows its products take longer than unpacking, which then is
done block by block, so that what is unpacked stays in the cache.
"""

from collections.abc import Callable

import torch

from dataplane.engines.torch.model.quantized.formats import Format, GroupedFormat, Side, Tensors

PACKED_ROWS = 96
"""Up to so many rows torch's product takes less than unpacking does."""
_BITS = 4
_BLOCKS = {"AVX512": 64, "AVX2": 32}
"""Outputs of a block, by what torch calls a CPU's vectors. Others have another layout, without blocks."""
_GROUPS = (32, 64, 128, 256)
"""What torch's product takes."""
_MIDDLE = 8
"""torch's integers count from -8."""


def block_outputs() -> int | None:
    """The outputs of a block on this CPU; None if torch has no such layout for it."""
    return _BLOCKS.get(torch.backends.cpu.get_cpu_capability())


def can_repack(source: Format, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of a format can be kept for torch's product on this CPU, if that is the device."""
    block = block_outputs()
    return (
        isinstance(source, GroupedFormat)
        and device.type == "cpu"
        and dtype == torch.bfloat16
        and source.quantization.bits == _BITS
        and (not source.quantization.by_index or source.shape.inputs == source.shape.inputs_of_all_ranks)
        and source.group in _GROUPS
        and source.shape.inputs % source.group == 0
        and block is not None
        and source.shape.outputs % block == 0
    )


class Int4CpuFormat(Format):
    """Four bits of another format in blocks: `packed` `[blocks, inputs, half a block]` bytes, and `scaling` `[groups,
    outputs, 2]`: scales, and what an integer 8 stands for. Inputs that are in groups in any order are brought into that
    of their groups: `order` `[inputs]`.
    """

    def __init__(self, source: GroupedFormat) -> None:
        super().__init__(source.quantization, source.shape)
        block = block_outputs()
        assert block is not None, "torch has no layout of blocks for this CPU"
        self._source, self._block = source, block

    def sides(self) -> dict[str, tuple[Side, ...]]:
        """The tensors of a checkpoint, and their sides."""
        return self._source.sides()

    def kept(self, types: object) -> dict[str, torch.Tensor]:
        """The tensors that lie in memory, empty on `meta`, whatever the types of those of the checkpoint."""
        outputs, inputs, block = self.shape.outputs, self.shape.inputs, self._block
        kept = {
            "packed": torch.empty(outputs // block, inputs, block // 2, dtype=torch.uint8, device="meta"),
            "scaling": torch.empty(inputs // self._source.group, outputs, 2, dtype=torch.bfloat16, device="meta"),
        }
        if self.quantization.by_index:
            kept["order"] = torch.empty(inputs, dtype=torch.int32, device="meta")
        return kept

    def repack(self, stored: Tensors, kept: Tensors) -> None:
        """Fill the tensors in memory from those of the checkpoint.

        Raises:
            ValueError: groups have other numbers or sizes than the config says.
        """
        half, integers = self._block // 2, self._source.integers(stored)
        if self.quantization.by_index:
            kept["order"].copy_(self._order(stored["g_idx"]))
            integers = integers[kept["order"]]
        integers = integers.view(self.shape.inputs, -1, 2, half)
        packed = integers[:, :, 0] | integers[:, :, 1] << 4
        kept["packed"].copy_(packed.transpose(0, 1))
        scales, zeros = stored["scales"].float(), self._source.zeros(stored, torch.float32)
        kept["scaling"][..., 0] = scales
        kept["scaling"][..., 1] = (_MIDDLE - zeros) * scales

    def product(self, tensors: Tensors, input: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` to `[rows, outputs]`, a new tensor."""
        ordered = input[:, tensors["order"]] if self.quantization.by_index else input
        if len(input) > PACKED_ROWS:
            return self._by_blocks(tensors, ordered)
        packed = tensors["packed"].view(self.shape.outputs, self.shape.inputs // 2)
        multiply: Callable[..., torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001  # torch's name
        return multiply(ordered.contiguous(), packed, self._source.group, tensors["scaling"])

    def _order(self, index: torch.Tensor) -> torch.Tensor:
        """The inputs, group after group."""
        group = self._source.group
        groups = self.shape.inputs // group
        outside = index[(index < 0) | (index >= groups)]
        if len(outside):
            raise ValueError(f"g_idx puts an input into group {int(outside[0])}; the groups are 0 to {groups - 1}")
        counts = index.bincount(minlength=groups)
        wrong = (counts != group).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"g_idx puts {int(counts[first])} inputs into group {first}, quantization_config.group_size is {group}"
            )
        return index.argsort(stable=True)

    def _by_blocks(self, tensors: Tensors, input: torch.Tensor) -> torch.Tensor:
        """The product of many rows: each block is unpacked once."""
        block, half = self._block, self._block // 2
        out = input.new_empty(len(input), self.shape.outputs)
        weights = input.new_empty(self.shape.inputs, block)
        groups = weights.view(-1, self._source.group, block)
        scales, middles = (part.contiguous() for part in tensors["scaling"][:, None].unbind(-1))
        for number, packed in enumerate(tensors["packed"]):
            at = slice(number * block, (number + 1) * block)
            weights[:, :half] = (packed & 15).view(torch.int8).sub_(_MIDDLE)
            weights[:, half:] = (packed >> 4).view(torch.int8).sub_(_MIDDLE)
            groups.mul_(scales[..., at]).add_(middles[..., at])
            out[:, at] = input @ weights
        return out
