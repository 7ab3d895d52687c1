"""Which part of each weight a rank has under tensor parallelism (Megatron-LM's partition).

Attention heads, the inner columns of an MLP and the vocabulary are divided among the ranks; norms, routers and the
hidden size are not. So what leads to heads or inner columns is split by rows, what leads back from them by columns, and
the ranks' results of the latter are summed. With fewer KV heads than ranks, neighbouring ranks have the same one. A
vocabulary that cannot be divided is padded: embeddings and logits of padding are never used.

A rank's model is built from the config of a model with its share of heads, inner columns and tokens. A weight whose
shape differs between the two models is split along the dimension in which it differs.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.protocol.errors import ModelLoadError

_INNER_SIZES = ("intermediate_size", "moe_intermediate_size")
EXPERT_ROW_BYTES = 16
"""torch's grouped matrix product needs rows of multiples of so many bytes."""
_KV_WEIGHTS = ("k_proj", "v_proj", "k_norm")

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`size` rows or columns of a weight, in `shares` of equal size, of which the last may be padded."""

    size: int
    shares: int

    @property
    def share(self) -> int:
        """Rows or columns of one share, with padding."""
        return -(-self.size // self.shares)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The `count` rows or columns from `start` of a whole weight, which are those from `at` of a rank's."""

    start: int
    at: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a weight is divided along `dim` among `ranks`: each rank has a share of every segment, one after another."""

    dim: int
    segments: tuple[Segment, ...]
    ranks: int

    @property
    def size(self) -> int:
        """Rows or columns of the whole weight."""
        return sum(segment.size for segment in self.segments)

    def cuts(self, rank: int) -> Iterator[Cut]:
        """The parts of the whole weight that a rank has. Padding is in none of them."""
        before = at = 0
        for segment in self.segments:
            start = segment.share * (rank * segment.shares // self.ranks)
            count = min(segment.share, segment.size - start)
            if count > 0:
                yield Cut(start=before + start, at=at, count=count)
            before += segment.size
            at += segment.share


def rank_config(config: Any, ranks: int, itemsize: int, folder: Path | str) -> Any:
    """The config of the model that one of `ranks` ranks runs, whose weights have `itemsize` bytes. `folder`: or another
    source, for errors.

    Raises:
        ModelLoadError: the model cannot be divided among so many ranks.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = {name: size for name in _INNER_SIZES if (size := getattr(config, name, None))}
    for name, size in {"num_attention_heads": heads, **inner}.items():
        if size % ranks:
            raise ModelLoadError(f"{folder}: {name}={size} cannot be divided among {ranks} GPUs")
    if kv_heads % ranks and ranks % kv_heads:
        raise ModelLoadError(
            f"{folder}: num_key_value_heads={kv_heads} can neither be divided among {ranks} GPUs nor repeated for them"
        )
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        name, size = list(inner.items())[-1]
        if size // ranks * itemsize % EXPERT_ROW_BYTES:
            raise ModelLoadError(
                f"{folder}: {name}={size} among {ranks} GPUs makes rows of {size // ranks * itemsize} bytes in experts;"
                f" they must be multiples of {EXPERT_ROW_BYTES}"
            )
    mine = copy.deepcopy(config)
    mine.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    mine.num_attention_heads = heads // ranks
    mine.num_key_value_heads = max(kv_heads // ranks, 1)
    for name, size in inner.items():
        setattr(mine, name, size // ranks)
    mine.vocab_size = -(-config.vocab_size // ranks)
    mine.pad_token_id = None  # it may be another rank's; the row of padding is a row like any other here
    return mine


def make_splits(whole: Mapping[str, Shape], mine: Mapping[str, Shape], config: Any, ranks: int) -> dict[str, Split]:
    """The splits of the weights of which a rank has a part only, by name: from their shapes in the whole model, whose
    config is given, and in a rank's.
    """
    splits = {}
    for name, shape in mine.items():
        differing = [dim for dim, size in enumerate(shape) if size != whole[name][dim]]
        if differing:
            [dim] = differing
            split = Split(dim=dim, segments=_segments(name, whole[name][dim], config, ranks), ranks=ranks)
            assert sum(segment.share for segment in split.segments) == shape[dim], (name, split, shape)
            splits[name] = split
    return splits


def _segments(name: str, size: int, config: Any, ranks: int) -> tuple[Segment, ...]:
    """Those of a weight with `size` rows or columns. Fused weights have one for each of the weights in them."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv_shares = min(kv_heads, ranks)
    if ".qkv_proj." in name:
        head_dim = size // (config.num_attention_heads + 2 * kv_heads)
        kv = Segment(size=kv_heads * head_dim, shares=kv_shares)
        return Segment(size=config.num_attention_heads * head_dim, shares=ranks), kv, kv
    if ".gate_up_proj" in name:
        return (Segment(size=size // 2, shares=ranks),) * 2
    is_kv = any(f".{weight}." in name for weight in _KV_WEIGHTS)
    return (Segment(size=size, shares=kv_shares if is_kv else ranks),)
