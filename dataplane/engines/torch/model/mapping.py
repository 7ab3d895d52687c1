"""The mapping of a checkpoint's tensors to a model's parameters where the two are split differently.

transformers keeps all experts of a layer in one parameter; checkpoints hold them expert by expert. In row-major order
such a parameter is its stored tensors one after another, so that each is read straight to its location:

    gate_up_proj [experts, 2 * f, h] | gate 0 [f, h] | up 0 [f, h] | gate 1 [f, h] | up 1 [f, h] | ...
    down_proj    [experts, h, f]     | down 0 [h, f] | down 1 [h, f] | ...

Quantized experts have a parameter for each tensor of each of the three, such as `gate_proj.qweight`.
"""

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from dataplane.engines.torch.model.expert_names import expert_names
from dataplane.engines.torch.model.skeleton import PlacedTensor
from dataplane.engines.torch.model.split import Split

_EXPERTS = "mlp.experts"
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A parameter of all experts -> the linear layers of one expert in it, in order."""
_RENAMED = {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
"""Suffix of a parameter's name -> another name it may be stored under."""


def as_stored(places: Iterable[PlacedTensor], stored: Container[str]) -> tuple[PlacedTensor, ...]:
    """The places split and named as in the checkpoint; `stored` are the names of its tensors.

    A parameter that the checkpoint holds as one tensor is unchanged.
    """
    return tuple(piece for place in places for piece in _pieces(place, stored))


def _pieces(place: PlacedTensor, stored: Container[str]) -> Iterator[PlacedTensor]:
    name = place.names[0]
    before, found, after = name.rpartition(f"{_EXPERTS}.")
    projection, _, tensor = after.partition(".")
    if not found or name in stored:
        also = (name.removesuffix(end) + other for end, other in _RENAMED.items() if name.endswith(end))
        yield replace(place, names=(*place.names, *also))
        return
    layers = (projection,) if tensor else _FUSED[projection]
    experts, *sizes = place.shape
    shape = (sizes[0] // len(layers), *sizes[1:]) if sizes else ()
    piece_bytes = math.prod(shape) * place.dtype.itemsize
    for number in range(experts * len(layers)):
        expert, layer = divmod(number, len(layers))
        known = expert_names(f"{before}{_EXPERTS}", layers[layer], expert)
        names = tuple(f"{one}.{tensor or 'weight'}" for one in known)
        offset_bytes = place.offset_bytes + number * piece_bytes
        split = None if place.split is None else _split_of_expert(place.split, layer)
        yield replace(place, names=names, shape=shape, offset_bytes=offset_bytes, split=split)


def _split_of_expert(split: Split, layer: int) -> Split:
    """How one of an expert's tensors is divided, where the parameter of all experts is."""
    return replace(split, dim=split.dim - 1, segments=(split.segments[layer],))
