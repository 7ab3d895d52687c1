"""What the torch engine says of its pool: the memory, the last turns."""

from dataplane.engines.core.relief import KvRelief
from dataplane.engines.core.turn_log import TurnLog
from dataplane.engines.interface import KvShapeStats, PoolStats
from dataplane.engines.torch.copies.open import PINS
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.pooled import Pooled
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.memory.kv_cache import KvCache
from dataplane.memory.slabs import SlabArena
from dataplane.scheduling.prefill import PrefillQueue
from dataplane.scheduling.schedule import Turn


def pool_stats(
    *,
    now_s: float,
    turn: Turn | None,
    load: float,
    weights: WeightStore,
    kv: KvStore,
    arena: SlabArena,
    prefills: PrefillQueue,
    log: TurnLog,
    host_cache_bytes: int,
    relief: KvRelief[Pooled, SequenceKv],
) -> PoolStats:
    """The state of the pool right now."""
    kv_slabs, free_slabs, moving_slabs = arena.kv_slabs, arena.free_slabs, arena.moving_slabs
    return PoolStats(
        now_s=now_s,
        running_model=turn.model if turn else None,
        next_model=turn.next_model if turn else None,
        arriving_models=weights.arriving_models,
        load=load,
        prefills_waiting=sum(len(group.waiting) for group in prefills.groups),
        slabs={
            "weights": arena.slabs - kv_slabs - free_slabs - moving_slabs,
            "kv": kv_slabs,
            "free": free_slabs,
            "moving": moving_slabs,
        },
        kv=_shapes(kv.here),
        host_kv=_shapes(kv.away),
        host_cache_bytes=host_cache_bytes,
        weights_bytes_per_s=weights.bytes_per_s,
        unpinned=PINS.refused,
        given_up=weights.given_up,
        relief=dict(relief.ways),
        not_remapped=dict(relief.refusals),
        layers_moved=dict(relief.layers),
        turns=tuple(log.turns),
        prefill_pace=log.prefill_pace,
    )


def _shapes(cache: KvCache) -> tuple[KvShapeStats, ...]:
    return tuple(
        KvShapeStats(
            shape=f"{shape.layers}x{shape.kv_heads}x{shape.head_dim}",
            used_bytes=usage.used_bytes,
            held_bytes=usage.held_bytes,
            moving_bytes=usage.moving_bytes,
        )
        for shape, usage in sorted(cache.usage().items())
    )
