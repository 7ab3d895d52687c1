"""The memory statistics of the torch engine."""

from dataplane.engines.interface import KvShapeStats, PoolStats
from dataplane.engines.torch.copies.open import PINS
from dataplane.engines.torch.memory.kv import KvStore
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.memory.kv_cache import KvCache
from dataplane.memory.slabs import SlabArena


def memory_stats(
    now_s: float, weights: WeightStore, kv: KvStore, arena: SlabArena, *, host_cache_bytes: int
) -> PoolStats:
    """The memory fields; `slabs` counts slabs of the arena."""
    kv_slabs, free_slabs, moving_slabs = arena.kv_slabs, arena.free_slabs, arena.moving_slabs
    cached_slabs = len(kv.clearable_slabs())
    return PoolStats(
        now_s=now_s,
        arriving_models=weights.arriving_models,
        slabs={
            "weights": arena.slabs - kv_slabs - free_slabs - moving_slabs,
            "kv": kv_slabs - cached_slabs,
            "cached": cached_slabs,
            "free": free_slabs,
            "moving": moving_slabs,
        },
        kv=_shapes(kv.device_cache),
        host_kv=_shapes(kv.host_cache),
        host_cache_bytes=host_cache_bytes,
        weights_bytes_per_s=weights.bytes_per_s,
        unpinned=PINS.refused,
        offloaded_layers=weights.offloaded,
        kv_imports=kv.imports.waited_for,
    )


def _shapes(cache: KvCache) -> tuple[KvShapeStats, ...]:
    return tuple(
        KvShapeStats(
            shape=f"{shape.layers}x{shape.kv_heads}x{shape.head_dim}",
            used_bytes=usage.used_bytes,
            held_bytes=usage.held_bytes,
            moving_bytes=usage.moving_bytes,
            cached_bytes=usage.idle_bytes,
        )
        for shape, usage in sorted(cache.usage().items())
    )
