"""The memory statistics of the replay engine."""

from collections.abc import Iterable

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.interface import KvShapeStats, PoolStats
from dataplane.engines.replay.kv import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.weights import WeightsMemory


def memory_stats(
    now_s: float, weights: WeightsMemory, kv: ReplayKvMemory, sequences: Iterable[SequenceKv]
) -> PoolStats:
    """The memory fields. A replay has no slabs: `slabs` are bytes."""
    moving = (KvLocation.SWAPPING_OUT, KvLocation.SWAPPING_IN)
    each = [(one.bytes_per_token, one.device_bytes, one.host_bytes, one.location in moving) for one in sequences]
    return PoolStats(
        now_s=now_s,
        arriving_models=weights.arriving_models(now_s),
        slabs={
            "weights": weights.used_bytes - weights.offloaded_bytes,
            "kv": kv.used_bytes,
            "free": weights.free_bytes + kv.spare_bytes,
        },
        kv=_shapes((per_token, device_bytes, is_moving) for per_token, device_bytes, _, is_moving in each),
        host_kv=_shapes((per_token, host_bytes, is_moving) for per_token, _, host_bytes, is_moving in each),
        offloaded_layers=weights.offloaded,
    )


def _shapes(kept: Iterable[tuple[int, int, bool]]) -> tuple[KvShapeStats, ...]:
    """By bytes per token; given of each KV the bytes per token, its bytes, and whether they are being transferred."""
    used: dict[int, int] = {}
    moving: dict[int, int] = {}
    for bytes_per_token, size_bytes, is_moving in kept:
        used[bytes_per_token] = used.get(bytes_per_token, 0) + size_bytes
        moving[bytes_per_token] = moving.get(bytes_per_token, 0) + size_bytes * is_moving
    return tuple(
        KvShapeStats(
            shape=f"{bytes_per_token} bytes per token",
            used_bytes=used_bytes,
            held_bytes=used_bytes,
            moving_bytes=moving[bytes_per_token],
        )
        for bytes_per_token, used_bytes in sorted(used.items())
        if used_bytes
    )
