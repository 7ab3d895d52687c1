"""A model without weights: transformers' own classes, built once on `meta`, bound to buffers while it is loaded.

Building on `meta` costs milliseconds even for large models. Every Parameter is then replaced by a view into a buffer
(`bind`), and by its empty self again when the weights are evicted (`unbind`): a forward pass over missing weights fails
loudly. Tied weights are one tensor with several names.

Weights are cut into *shards* in the order of use: what precedes the layers, each decoder layer, what follows them. A
shard is contiguous and may be located, and loaded, apart from the others: each waits for its own event when it runs.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig

from dataplane.checkpoints.eos import read_eos_ids
from dataplane.checkpoints.safetensors_file import read_json
from dataplane.engines.torch.model.adapters import Adapter, Adapters
from dataplane.engines.torch.model.checkpoint import list_tensors
from dataplane.engines.torch.model.inputs import ChunkInput, Wanted
from dataplane.engines.torch.model.linear import merge_products, speed_up
from dataplane.engines.torch.model.norms import fuse_norms
from dataplane.engines.torch.model.parallel import Rank, parallelize
from dataplane.engines.torch.model.parts import build_part
from dataplane.engines.torch.model.quantized.config import read_quantization
from dataplane.engines.torch.model.quantized.int4_cpu import can_repack
from dataplane.engines.torch.model.quantized.layers import PackedWeights, QuantizedLinear
from dataplane.engines.torch.model.quantized.replace import quantize
from dataplane.engines.torch.model.split import Split
from dataplane.memory.events import Event
from dataplane.memory.slabs import aligned
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task

MODEL_TYPES = frozenset(
    [
        "cohere2",
        "gemma2",
        "gemma3_text",
        "glm4",
        "granite",
        "internlm3",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    ]
)
"""Architectures whose output was compared with transformers' own `generate`; others are refused, not guessed at."""

ADDRESSES_KEPT = 4
"""How many locations of a shard in the arena a skeleton keeps views for."""
_UNSUPPORTED_ROPE = frozenset(("dynamic", "longrope"))


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """A weight and its location in its shard. `names`: all its names, the model's own first. `split`: how the whole
    weight is divided, if a rank has a part of it only. `layer`: the one in whose `Repacked.stored_bytes` it is located
    instead, if any.
    """

    names: tuple[str, ...]
    shard: int
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: Split | None = None
    layer: str = ""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        if self.split is None:
            return self.shape
        return tuple(self.split.size if dim == self.split.dim else size for dim, size in enumerate(self.shape))

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside `buffer`, a flat uint8 tensor that starts where the shard starts."""
        elements = 1
        for side in self.shape:
            elements *= side
        flat = buffer[self.offset_bytes : self.offset_bytes + elements * self.dtype.itemsize]
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that the KV cache, the limits and the sampler need. `kv_heads`: those of this rank, of the model's
    `kv_heads_total`.
    """

    layers: int
    kv_heads: int
    kv_heads_total: int
    head_dim: int
    vocabulary: int
    context_tokens: int

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """The bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """Consecutive bytes of a model's weights in host memory that are transferred together."""

    offset_bytes: int
    size_bytes: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The shard inside a model's flat uint8 buffer."""
        return buffer[self.offset_bytes : self.offset_bytes + self.size_bytes]


@dataclass(frozen=True, eq=False, kw_only=True)
class Repacked:
    """A layer whose tensors lie in memory otherwise than in the checkpoint, from which they are read to a buffer of
    `stored_bytes` first. Both kinds of places are by the name of the tensor in the layer.
    """

    weights: PackedWeights
    stored: Mapping[str, PlacedTensor]
    stored_bytes: int
    kept: Mapping[str, PlacedTensor]

    def repack(self, stored: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill the layer's part of its `shard` from what was read to `stored`, both flat uint8."""
        self.weights.repack(
            {name: place.view(stored) for name, place in self.stored.items()},
            {name: place.view(shard) for name, place in self.kept.items()},
        )


class Mirror(Protocol):
    """What lets other ranks follow a model, on the rank that decides."""

    def hold(self, host: torch.Tensor, file: Path) -> Event:
        """A host copy was made: this rank's part of a file with the parts of all ranks, one after another. The event is
        done when they have mapped it: until then the file must stay where it is.
        """

    def release(self) -> None:
        """The host copy is released once no transfer reads it."""

    def forget(self) -> None:
        """The model is forgotten. It has no host copy."""

    def bound(self, shard: int, buffer: torch.Tensor) -> None:
        """A shard was bound to a buffer of the arena."""

    def adapt(self, parts: Sequence[Adapter]) -> None:
        """Serve an adapter: those of the other ranks, in order.

        Raises:
            ModelLoadError: one has no memory for it; none serves it then.
        """

    def drop_adapter(self, name: str) -> None:
        """Serve an adapter no more."""

    def step(self, wanted: Wanted, inputs: Sequence[ChunkInput]) -> AbstractContextManager[None]:
        """Let the other ranks run a forward pass, while this one does."""


class Skeleton:
    """A model's modules. `places` and `shards` describe the layout of its weights; in host memory they take
    `size_bytes`. `repacked`: layers that lie there otherwise than in the checkpoint, by name. `trunk`: the model
    without what makes logits or scores of its states; `head`: what makes scores.

    `await_shard` is called before a shard is used; it is set while the weights are loaded. `passed_shard` is called
    once the kernels of a layer, or of the output embedding, are submitted; it is set while layers rotate. `splits`: of
    the weights of which this rank has a part; `mirror`: set where other ranks follow this one. `addresses`: of the
    shards, as they were bound last; `can_have_graphs`: whether a step's kernels depend on the number of rows alone,
    which those of experts do not. `adapters`: what LoRA adapters add to its linear layers, none at first.
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        eos_ids: frozenset[int],
        dtype: torch.dtype,
        task: Task = "generate",
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        self.model = model
        self.task = task
        self.trunk: torch.nn.Module = model.base_model
        self.head: torch.nn.Module | None = getattr(model, "score", None)
        self.dtype = dtype
        self.geometry = geometry
        self.eos_ids = eos_ids
        self.await_shard: Callable[[int], None] | None = None
        self.passed_shard: Callable[[int], None] | None = None
        self.mirror: Mirror | None = None
        self.adapters = Adapters()
        self._splits = splits or {}
        slots = _parameter_slots(model)
        stages = _stages(model)
        self.places, self.shards = _lay_out(slots, stages, self._splits)
        self.repacked = _repacked(model, self.places, self._splits)
        merge_products(model, {place.names[0]: place.offset_bytes for place in self.places})
        self.size_bytes = sum(shard.size_bytes for shard in self.shards)
        self.addresses: tuple[int, ...] = (0,) * len(self.shards)
        self.can_have_graphs = not any(name.endswith("experts") for name, _ in model.named_modules())
        self._views: list[dict[int, list[torch.nn.Parameter]]] = [{} for _ in self.shards]
        self._slots: list[list[tuple[PlacedTensor, _Slot]]] = [[] for _ in self.shards]
        for place, slot in zip(self.places, slots, strict=True):
            self._slots[place.shard].append((place, slot))
        for number, stage in enumerate(stages, start=1):
            stage.register_forward_pre_hook(self._gate(number))
            stage.register_forward_hook(self._passed(number))
        self.trunk.register_forward_pre_hook(self._gate(0))

    @property
    def is_quantized(self) -> bool:
        """Whether some of its weights are packed integers or 8-bit numbers."""
        return any(isinstance(module, PackedWeights) for module in self.model.modules())

    @property
    def places_to_read(self) -> tuple[PlacedTensor, ...]:
        """Where the tensors of the checkpoint are read to."""
        kept = {id(place) for layer in self.repacked.values() for place in layer.kept.values()}
        straight = (place for place in self.places if id(place) not in kept)
        return (*straight, *(place for layer in self.repacked.values() for place in layer.stored.values()))

    @property
    def can_be_captured(self) -> bool:
        """Whether a step could be captured as a CUDA graph now: all weights are in place, on this rank alone."""
        moves = (self.await_shard, self.passed_shard, self.mirror)
        return self.can_have_graphs and all(one is None for one in moves)

    def adaptable_layers(self) -> dict[str, torch.nn.Module]:
        """The linear layers of its decoder layers, which adapters may change, by name."""
        inside = {id(module) for layer in self.model.get_decoder().layers for module in layer.modules()}
        return {
            name: module
            for name, module in self.model.named_modules()
            if id(module) in inside and isinstance(module, torch.nn.Linear | QuantizedLinear)
        }

    def layer_splits(self) -> dict[str, Split]:
        """How the weights of layers are divided among ranks, by the name of the layer."""
        end = ".weight"
        return {name.removesuffix(end): split for name, split in self._splits.items() if name.endswith(end)}

    def slabs(self, slab_bytes: int) -> int:
        """How many slabs the weights take on the device, where each shard begins a slab."""
        return sum(-(-shard.size_bytes // slab_bytes) for shard in self.shards)

    def bind(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make every Parameter a view into the buffer of its shard: flat uint8, one for each of `shards`."""
        for shard, buffer in enumerate(buffers):
            self.bind_shard(shard, buffer)

    def bind_shard(self, shard: int, buffer: torch.Tensor) -> None:
        """Bind one shard. Views for an earlier location are reused: making them is what costs."""
        views = self._views[shard]
        address = buffer.data_ptr()
        parameters = views.pop(address, None)
        if parameters is None:
            parameters = [_parameter(place, buffer) for place, _ in self._slots[shard]]
        views[address] = parameters
        self.addresses = (*self.addresses[:shard], address, *self.addresses[shard + 1 :])
        for parameter, (place, (_, owners)) in zip(parameters, self._slots[shard], strict=True):
            assert parameter.shape == place.shape, (place.names[0], place.shape)
            _replace(owners, parameter)
        if len(views) > ADDRESSES_KEPT:
            del views[next(iter(views))]
        if self.mirror is not None:
            self.mirror.bound(shard, buffer)

    def unbind(self) -> None:
        """Restore the empty Parameters."""
        for shard in range(len(self.shards)):
            self.unbind_shard(shard)

    def unbind_shard(self, shard: int) -> None:
        for _, (meta, owners) in self._slots[shard]:
            _replace(owners, meta)

    def _gate(self, shard: int) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self.await_shard is not None:
                self.await_shard(shard)

        return wait

    def _passed(self, shard: int) -> Callable[..., None]:
        def notify(*_: Any) -> None:
            if self.passed_shard is not None:
                self.passed_shard(shard)

        return notify


_Owner = tuple[str, torch.nn.Module, str]
_Slot = tuple[torch.nn.Parameter, list[_Owner]]


def build_skeleton(
    folder: Path, dtype: torch.dtype, device: torch.device, task: Task = "generate", rank: Rank | None = None
) -> Skeleton:
    """The model that `folder/config.json` describes, as its task needs it: one that embeds has no head. Its buffers are
    on `device`, its Parameters on `meta`. `rank`: of several, which run the model together.

    Raises:
        ModelLoadError: no such folder or config, an unsupported architecture or quantization, or a model that cannot be
            divided among so many ranks.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is no folder")
    described = read_json(folder / "config.json")
    _check_supported(folder, described)
    quantization = read_quantization(folder, described)
    ranks = 1 if rank is None else rank.count
    try:
        config = copy.deepcopy(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        model, splits = build_part(config, described, task, dtype, ranks, folder)
        geometry = _geometry(config, ranks)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{folder}/config.json describes no model that can be built: {error}") from error
    if quantization is not None:
        repacks = partial(can_repack, dtype=dtype, device=device)
        splits |= quantize(folder, model, quantization, list_tensors(folder, task), splits, repacks)
    _check_rope(folder, getattr(config, "rope_parameters", None))
    _fill_buffers(model, device)
    model.eval().requires_grad_(False)
    if device.type == "cpu":
        speed_up(model)
    if device.type == "cuda":
        fuse_norms(model)
    if rank is not None and splits:
        parallelize(model, splits, rank, geometry.vocabulary)
    return Skeleton(model, geometry, read_eos_ids(folder, described), dtype, task, splits)


def _check_supported(folder: Path, described: dict[str, Any]) -> None:
    model_type = described.get("model_type")
    if model_type not in MODEL_TYPES:
        supported = ", ".join(sorted(MODEL_TYPES))
        raise ModelLoadError(f"{folder}: unsupported architecture {model_type!r}; supported are {supported}")


def _check_rope(folder: Path, rope_parameters: dict[str, Any] | None) -> None:
    """Refuse angles that depend on the longest sequence of a step batch: a text would depend on other requests."""
    given = rope_parameters or {}
    kinds = [given, *(kind for kind in given.values() if isinstance(kind, dict))]
    unsupported = [kind["rope_type"] for kind in kinds if kind.get("rope_type") in _UNSUPPORTED_ROPE]
    if unsupported:
        raise ModelLoadError(f"{folder}: rope type {unsupported[0]!r} is not supported")


def _geometry(config: Any, ranks: int) -> Geometry:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Geometry(
        layers=config.num_hidden_layers,
        kv_heads=max(kv_heads // ranks, 1),
        kv_heads_total=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        context_tokens=config.max_position_embeddings,
    )


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Initialize non-persistent buffers (rotary frequencies, Gemma's scale), which no checkpoint contains.

    `initialize_weights` is what transformers itself calls for them after loading. On the Parameters, still on
    `meta`, it does nothing.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            empty = torch.empty_like(buffer, device=device)
            module.register_buffer(name, empty.fill_(float("nan")), persistent=False)
    model.initialize_weights()
    unfilled = [name for name, buffer in model.named_buffers() if buffer.isnan().any()]
    if unfilled:
        raise ModelLoadError(f"buffers {', '.join(unfilled)} have no known values; the architecture is not supported")


def _parameter_slots(model: torch.nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            slots.setdefault(id(parameter), (parameter, []))[1].append((full_name, module, name))
    return list(slots.values())


def _stages(model: Any) -> list[torch.nn.Module]:
    """The modules with a shard of their own: the decoder layers in order, then the output embedding."""
    head = model.get_output_embeddings()
    tied = head is None or getattr(head, "weight", None) is model.get_input_embeddings().weight  # packed: not tied
    return [*model.get_decoder().layers, *([] if tied else [head])]


def _lay_out(
    slots: list[_Slot], stages: list[torch.nn.Module], splits: Mapping[str, Split]
) -> tuple[tuple[PlacedTensor, ...], tuple[WeightShard, ...]]:
    """Shard 0 is everything outside of the stages; parameters keep their order within a shard."""
    shard_of = {id(module): number for number, stage in enumerate(stages, start=1) for module in stage.modules()}
    sizes = [0] * (len(stages) + 1)
    places = []
    for parameter, owners in slots:
        shard = min(shard_of.get(id(module), 0) for _, module, _ in owners)
        names = tuple(full_name for full_name, _, _ in owners)
        places.append(
            PlacedTensor(
                names=names,
                shard=shard,
                offset_bytes=sizes[shard],
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                split=splits.get(names[0]),
            )
        )
        sizes[shard] += aligned(parameter.numel() * parameter.dtype.itemsize)
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    shards = (WeightShard(offset_bytes=start, size_bytes=size) for start, size in zip(starts, sizes, strict=True))
    return tuple(places), tuple(shards)


def _repacked(
    model: torch.nn.Module, places: tuple[PlacedTensor, ...], splits: Mapping[str, Split]
) -> dict[str, Repacked]:
    placed, found = {place.names[0]: place for place in places}, {}
    for prefix, module in model.named_modules():
        if isinstance(module, PackedWeights) and module.is_repacked:
            kept = {name: placed[f"{prefix}.{name}"] for name in module.kept_names}
            (shard,) = {place.shard for place in kept.values()}
            stored, size_bytes = {}, 0
            for name, empty in module.stored().items():
                full_name = f"{prefix}.{name}"
                stored[name] = PlacedTensor(
                    names=(full_name,),
                    shard=shard,
                    offset_bytes=size_bytes,
                    shape=tuple(empty.shape),
                    dtype=empty.dtype,
                    split=splits.get(full_name),
                    layer=prefix,
                )
                size_bytes += aligned(empty.nbytes)
            found[prefix] = Repacked(weights=module, stored=stored, stored_bytes=size_bytes, kept=kept)
    return found


def _parameter(place: PlacedTensor, buffer: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(place.view(buffer), requires_grad=False)


def _replace(owners: list[_Owner], parameter: torch.nn.Parameter) -> None:
    for _, module, name in owners:
        module._parameters[name] = parameter  # noqa: SLF001  # setattr is ten times slower, and a switch is timed
