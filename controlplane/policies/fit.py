"""Whether a model's weights fit on a slot: in the data type that its node computes in, against what each worker of the
slot has for weights. Placement, pools, scaling and the admin API all ask here.

What is not known is not held against a model: an agent from before it said so, a model registered without its number of
parameters. The node then finds out when it loads the model.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_STORED_BYTES_MIN = 1.75
"""Of an element as it is stored, on average, where weights are not quantized: two, less what a rounded number of
parameters makes of it. Those of 8 bits take about one.
"""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class AdapterSize:
    """What a LoRA adapter takes beside the weights of its base."""

    base: str
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model's weights: their bytes as stored, and how many elements they are, tied ones once; None: not known. Of an
    `adapter` they are those of its base, without which it does not run.
    """

    weights_bytes: int
    parameters: int | None = None
    adapter: AdapterSize | None = None


@dataclass(frozen=True, kw_only=True)
class WeightsMemory:
    """Memory for weights of each worker of a slot; None: not reported. `dtype`: what the node computes in;
    None: it keeps weights as they are stored, as replays do.
    """

    weights_bytes: int | None = None
    dtype: str | None = None


UNKNOWN_MEMORY = WeightsMemory()
"""Of a slot whose agent does not report it."""


def needed_bytes(size: ModelSize, memory: WeightsMemory) -> int | None:
    """What the weights take on such a slot, on all its GPUs together; None: not known. Quantized weights stay as they
    are stored, but for those of other layers where the node computes in float32.
    """
    if memory.dtype is None or is_quantized(size):
        return size.weights_bytes
    if size.parameters is None or memory.dtype not in _ELEMENT_BYTES:
        return None
    return size.parameters * _ELEMENT_BYTES[memory.dtype]


def is_quantized(size: ModelSize) -> bool:
    """Whether the weights are stored in fewer bytes than any data type of a node has."""
    return size.parameters is not None and size.weights_bytes < _STORED_BYTES_MIN * size.parameters


def fits(size: ModelSize, memory: WeightsMemory) -> bool:
    """Whether the weights fit on such a slot, as far as is known."""
    needed = needed_bytes(size, memory)
    return needed is None or memory.weights_bytes is None or needed <= memory.weights_bytes


def why_unfit(model: str, size: ModelSize, memories: Iterable[tuple[str, WeightsMemory]], region: str) -> str | None:
    """Why the weights fit on none of the slots, in MiB and with what to change; None: they do, or there are none.

    Args:
        model: its name.
        size: its weights.
        rooms: GPU type and memory of each slot that could be meant.
        region: where these slots are.
    """
    largest: dict[str, WeightsMemory] = {}
    for gpu_type, memory in memories:
        if fits(size, memory):
            return None
        if gpu_type not in largest or _lack(size, memory) < _lack(size, largest[gpu_type]):
            largest[gpu_type] = memory
    if not largest:
        return None
    sizes = [_size_message(size, gpu_type, memory) for gpu_type, memory in sorted(largest.items())]
    halved = any(_halved(size, memory) for memory in largest.values())
    dtype = "set TIDEPOOL_AGENT_DTYPE=bfloat16 there, " if halved else ""
    return (
        f"the weights of {model} fit on no slot in {region}: {'; '.join(sizes)}. To change that {dtype}give slots more"
        " memory_bytes or a smaller TIDEPOOL_AGENT_KV_SHARE, or take a smaller model"
    )


def why_too_small(model: str, gpus: int, sizes: Collection[int], place: str) -> str | None:
    """Why no slot of a place is large enough for a model; None: one is, or there are none.

    Args:
        model: its name.
        gpus: of an instance of it.
        sizes: GPUs of the workers of the slots there.
        place: in words, as "H800 in us-east".
    """
    if not sizes or gpus <= max(sizes):
        return None
    return f"{model} takes {gpus} GPUs together, the largest slot of {place} has {max(sizes)}"


def why_not_over_hosts(model: str, gpus: int, size: ModelSize | None, sizes: Collection[int], place: str) -> str | None:
    """Why a model runs on no slot of a place whose slots are of several hosts; None: it does, or there are none.

    Args:
        model: its name.
        gpus: of an instance of it.
        size: its weights; None: not known.
        sizes: GPUs of the slots of several hosts there.
        place: in words, as "H800x2 in us-east".
    """
    if not sizes:
        return None
    if size is not None and size.adapter is not None:
        return f"{model} is a LoRA adapter, the slots of {place} are of several hosts, which serve none"
    if gpus in sizes:
        return None
    whole = " or ".join(str(each) for each in sorted(sizes))
    return f"{model} takes {gpus} GPUs, the slots of {place} are of several hosts: a model takes all {whole} of one"


def _lack(size: ModelSize, memory: WeightsMemory) -> int:
    return (needed_bytes(size, memory) or 0) - (memory.weights_bytes or 0)


def _halved(size: ModelSize, memory: WeightsMemory) -> bool:
    """Whether they would fit in half the bytes an element."""
    return memory.dtype == "float32" and fits(size, WeightsMemory(weights_bytes=memory.weights_bytes, dtype="bfloat16"))


def _size_message(size: ModelSize, gpu_type: str, memory: WeightsMemory) -> str:
    kept = "as stored" if memory.dtype is None or is_quantized(size) else f"in {memory.dtype}"
    needed, most = needed_bytes(size, memory) or 0, memory.weights_bytes or 0
    return f"{-(-needed // _MIB):,} MiB {kept}, the largest slot of {gpu_type} has {most // _MIB:,} MiB for weights"
