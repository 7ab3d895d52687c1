"""What the engine says of itself: the load of its instances, the state of the pool, the last turns."""

from collections.abc import Iterable

from dataplane.engine import InstanceStats, KvShapeStats, PoolStats
from dataplane.engines.torch.kv import KvStore
from dataplane.engines.torch.pooled import Pooled
from dataplane.engines.torch.room import Room
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.engines.torch.weights import WeightStore
from dataplane.engines.turn_log import TurnLog
from dataplane.memory.kv_cache import KvCache
from dataplane.memory.slabs import SlabArena
from dataplane.turns.prefill import PrefillQueue
from dataplane.turns.schedule import Turn


def instance_stats(instance_id: str, pooled: Pooled, requests: Iterable[TokenSequence], kv: KvStore) -> InstanceStats:
    """The load of an instance. It could take what KV memory is free beside its own."""
    mine = [s for s in requests if s.request.instance_id == instance_id]
    running = [s for s in mine if s in pooled.sequences]
    used_bytes = sum(max(len(s.kv.blocks), len(s.kv.host)) for s in mine) * pooled.shape.block_bytes
    return InstanceStats(
        instance_id=instance_id,
        kv_tokens_max=kv.capacity_tokens(pooled.shape),
        kv_used_bytes=used_bytes,
        kv_capacity_bytes=used_bytes + kv.free_blocks(pooled.shape) * pooled.shape.block_bytes,
        remaining_tokens=sum(s.remaining_tokens for s in mine),
        running=len(running),
        waiting=len(mine) - len(running),
    )


def swap_counts(room: Room, kv: KvStore) -> dict[str, float]:
    """How often KV left or came since the start, and how often it had to be computed anew."""
    return {
        "preemptions": room.preemptions_total,
        "recomputed": room.recomputed_total,
        "swapped_out": kv.swapped_out_total,
        "swapped_in": kv.swapped_in_total,
    }


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
        turns=tuple(log.turns),
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
