"""LoRA adapters beside a model: what they add to the outputs of its linear layers, row by row of a step batch.

The rows of a batch may have different adapters, or none. The factors of all adapters in the batch are put side by side,
so that a layer computes two products whatever their number, and between the two every row keeps what its own adapter
made:

    down x        [rows, rank of a | rank of b | ...]
                  row of a:   kept |    0      |          row without an adapter: 0 | 0
    up (...)      [rows, outputs], added to the layer's own output

A row without an adapter thus gets zeros added, and its output is the base's, bit for bit. Factors are finite, which is
checked when they are read, so that no row changes another one's.

Of a layer that is divided among ranks, each has the factors' rows or columns that belong to its own:

    column parallel   up by outputs, down whole     each rank adds to its own outputs
    row parallel      down by inputs, up whole      each rank adds to its part of the sum, before the ranks' are summed
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from dataplane.checkpoints.adapters import StoredAdapter
from dataplane.engines.core.uploads import upload
from dataplane.engines.torch.model.checkpoint import read_tensors
from dataplane.engines.torch.model.inputs import ChunkInput
from dataplane.engines.torch.model.split import Split
from dataplane.protocol.errors import ModelLoadError


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors:
    """Of one layer: `down` `[rank, inputs]`, and `up` `[outputs, rank]`, which contains the scale."""

    down: torch.Tensor
    up: torch.Tensor

    def to(self, device: torch.device) -> "Factors":
        return Factors(down=self.down.to(device), up=self.up.to(device))

    def part(self, split: Split | None, rank: int) -> "Factors":
        """Those of one of the ranks among which the weights of the layer are divided."""
        if split is None:
            return self
        whole = self.up if split.dim == 0 else self.down
        mine = torch.cat([whole.narrow(split.dim, cut.start, cut.count) for cut in split.cuts(rank)], dim=split.dim)
        return Factors(down=self.down, up=mine) if split.dim == 0 else Factors(down=mine, up=self.up)


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """An adapter in memory. `key` is of its numbers; `layers`: by the name of the layer."""

    name: str
    key: str
    rank: int
    layers: Mapping[str, Factors]

    @property
    def size_bytes(self) -> int:
        return sum(factors.down.nbytes + factors.up.nbytes for factors in self.layers.values())

    def to(self, device: torch.device) -> "Adapter":
        """The same on a device."""
        return replace(self, layers={name: factors.to(device) for name, factors in self.layers.items()})

    def part(self, splits: Mapping[str, Split], rank: int) -> "Adapter":
        """That of one rank. `splits`: how layers are divided, by name."""
        return replace(self, layers={name: one.part(splits.get(name), rank) for name, one in self.layers.items()})


class Adapters:
    """The adapters of one model on its device, and the rows of the present forward pass that have one."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._rows: _Rows | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def key(self, name: str) -> str:
        return self._adapters[name].key

    def add(self, adapter: Adapter, layers: Mapping[str, torch.nn.Module]) -> None:
        """Serve an adapter. `layers`: those of the model, by name. What joins the outputs of ranks comes after it."""
        self._adapters[adapter.name] = adapter
        for name in adapter.layers:
            if name not in self._hooks:
                add_products = partial(self._add_products, name)
                self._hooks[name] = layers[name].register_forward_hook(add_products, prepend=True)

    def remove(self, name: str) -> None:
        """Serve an adapter no more. Layers that no other one changes are as they were."""
        self._adapters.pop(name, None)
        self._rows = None  # it has the factors of the batch before
        changed = {layer for adapter in self._adapters.values() for layer in adapter.layers}
        for layer in [layer for layer in self._hooks if layer not in changed]:
            self._hooks.pop(layer).remove()

    def select(self, inputs: Iterable[ChunkInput]) -> None:
        """Set whose rows the next forward pass has: those of the chunks, in this order."""
        counts = [(chunk.adapter, chunk.count) for chunk in inputs]
        names = sorted({name for name, _ in counts if name})
        self._rows = _Rows([self._adapters[name] for name in names], counts) if names else None

    def _add_products(self, layer: str, _: torch.nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> None:
        if self._rows is not None:
            self._rows.add_products(layer, inputs[0], out)


class _Rows:
    """The rows of one forward pass. `counts`: (name of the adapter, how many rows in a row have it)."""

    def __init__(self, adapters: Sequence[Adapter], counts: Sequence[tuple[str, int]]) -> None:
        self._adapters = adapters
        numbers = {adapter.name: number for number, adapter in enumerate(adapters)}
        owners = np.repeat([numbers.get(name, -1) for name, _ in counts], [count for _, count in counts])
        self._is_mixed = bool((owners != owners[0]).any())
        self._owners = owners.astype(np.int64)
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}

    def add_products(self, layer: str, input: torch.Tensor, out: torch.Tensor) -> None:
        """Add to the output `[..., outputs]` of a layer, in place."""
        having = tuple(number for number, adapter in enumerate(self._adapters) if layer in adapter.layers)
        if not having:
            return
        factors = [self._adapters[number].layers[layer] for number in having]
        if len(factors) == 1:
            down, up = factors[0].down, factors[0].up
        else:
            down, up = torch.cat([one.down for one in factors]), torch.cat([one.up for one in factors], dim=1)
        inner = linear(input, down)
        if self._is_mixed:
            inner = torch.where(self._mask(having, input.device), inner, 0)
        out.add_(linear(inner, up))

    def _mask(self, having: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """`[rows, sum of ranks]`: which products of these adapters each row keeps."""
        kept = self._kept.get(having)
        if kept is None:
            columns = np.repeat(having, [self._adapters[number].rank for number in having])
            (kept,) = upload(device, self._owners[:, None] == columns[None, :])
            self._kept[having] = kept
        return kept


def read_factors(name: str, stored: StoredAdapter, dtype: torch.dtype) -> Adapter:
    """Read an adapter into host memory.

    Raises:
        ModelLoadError: a file cannot be read, or a number is not finite.
    """
    read: dict[str, Factors] = {}
    pairs = []
    for layer, one in stored.layers.items():
        down, up = (torch.empty(part.shape, dtype=torch.float32) for part in (one.down, one.up))
        read[layer] = Factors(down=down, up=up)
        pairs += [(one.down, down), (one.up, up)]
    read_tensors(pairs)
    made = {
        layer: Factors(down=factors.down.to(dtype), up=factors.up.mul_(stored.scale).to(dtype))
        for layer, factors in read.items()
    }
    for layer, factors in made.items():
        if not (factors.down.isfinite().all() and factors.up.isfinite().all()):
            raise ModelLoadError(f"{name}: the factors of {layer} in {stored.folder} are not all finite numbers")
    return Adapter(name=name, key=_key(made), rank=stored.rank, layers=made)


def check_layers(
    name: str, stored: StoredAdapter, layers: Mapping[str, torch.nn.Module], splits: Mapping[str, Split]
) -> None:
    """Check that an adapter is of a model. `layers`: those of it that an adapter may change; `splits`: how they are
    divided among ranks, both by name.

    Raises:
        ModelLoadError: it changes another layer, or one of another shape.
    """
    for layer, factors in stored.layers.items():
        module: Any = layers.get(layer)
        if module is None:
            known = ", ".join(sorted({known.rpartition(".")[2] for known in layers}))
            raise ModelLoadError(
                f"{name}: {stored.folder} changes {layer}, which is no linear layer of a decoder layer of its base;"
                f" supported are {known}"
            )
        found, wanted = (factors.up.shape[0], factors.down.shape[1]), _whole_shape(module, splits.get(layer))
        if found != wanted:
            raise ModelLoadError(
                f"{name}: {stored.folder} is of another base: it changes {layer} of shape {found}, not {wanted}"
            )


def _whole_shape(module: Any, split: Split | None) -> tuple[int, int]:
    """The outputs and inputs of a linear layer on all ranks together."""
    mine = [module.out_features, module.in_features]
    if split is not None:
        mine[split.dim] = split.size
    return mine[0], mine[1]


def part_bytes(stored: StoredAdapter, layers: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> int:
    """What a rank's part of an adapter of its model takes. `layers`: those of the rank, by name."""
    modules: list[Any] = [layers[name] for name in stored.layers]
    sides: int = sum(module.out_features + module.in_features for module in modules)
    return stored.rank * sides * dtype.itemsize


def _key(layers: Mapping[str, Factors]) -> str:
    """A key of all its numbers. Files that were replaced may have the size and the time of the former ones."""
    digest = hashlib.blake2b(digest_size=12)
    for name, factors in sorted(layers.items()):
        for factor in (factors.down, factors.up):
            digest.update(repr((name, factor.dtype, tuple(factor.shape))).encode())
            digest.update(factor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
