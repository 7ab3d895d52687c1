"""The mapping of a checkpoint's tensors to a model's parameters where the two are split differently.

transformers keeps all experts of a layer in one parameter; checkpoints hold them expert by expert. In row-major order
such a parameter is its stored tensors one after another, so that each is read straight to its location:

    gate_up_proj [experts, 2 * f, h] | gate 0 [f, h] | up 0 [f, h] | gate 1 [f, h] | up 1 [f, h] | ...
    down_proj    [experts, h, f]     | down 0 [h, f] | down 1 [h, f] | ...
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from dataplane.engines.torch.model.skeleton import PlacedTensor
from dataplane.engines.torch.model.split import Split

_EXPERTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "mlp.experts.gate_up_proj": (
        ("mlp.experts.{}.gate_proj.weight", "block_sparse_moe.experts.{}.w1.weight"),
        ("mlp.experts.{}.up_proj.weight", "block_sparse_moe.experts.{}.w3.weight"),
    ),
    "mlp.experts.down_proj": (("mlp.experts.{}.down_proj.weight", "block_sparse_moe.experts.{}.w2.weight"),),
}
"""Suffix of a parameter's name -> the tensors of one expert in order, each by the names it may be stored under."""

_RENAMED = {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
"""Suffix of a parameter's name -> another name it may be stored under."""


def as_stored(places: Iterable[PlacedTensor], stored: Container[str]) -> tuple[PlacedTensor, ...]:
    """The places split and named as in the checkpoint; `stored` are the names of its tensors.

    A parameter that the checkpoint holds as one tensor is unchanged.
    """
    return tuple(piece for place in places for piece in _pieces(place, stored))


def _pieces(place: PlacedTensor, stored: Container[str]) -> Iterator[PlacedTensor]:
    name = place.names[0]
    fused = next((end for end in _EXPERTS if name.endswith(end)), None)
    if fused is None or name in stored:
        also = (name.removesuffix(end) + other for end, other in _RENAMED.items() if name.endswith(end))
        yield replace(place, names=(*place.names, *also))
        return
    tensors = _EXPERTS[fused]
    experts, rows, columns = place.shape
    shape = (rows // len(tensors), columns)
    piece_bytes = shape[0] * columns * place.dtype.itemsize
    for number in range(experts * len(tensors)):
        expert, tensor = divmod(number, len(tensors))
        names = tuple(name.removesuffix(fused) + known.format(expert) for known in tensors[tensor])
        offset_bytes = place.offset_bytes + number * piece_bytes
        split = None if place.split is None else _split_of_expert(place.split, tensor)
        yield replace(place, names=names, shape=shape, offset_bytes=offset_bytes, split=split)


def _split_of_expert(split: Split, tensor: int) -> Split:
    """How one of an expert's tensors is divided, where the parameter of all experts is."""
    return replace(split, dim=split.dim - 1, segments=(split.segments[tensor],))
