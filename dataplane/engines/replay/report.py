"""What the replay engine says of its pool: the memory, the last turns."""

from collections.abc import Iterable

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.core.relief import KvRelief
from dataplane.engines.core.request_table import RequestTable
from dataplane.engines.core.turn_log import TurnLog
from dataplane.engines.interface import KvShapeStats, PoolStats
from dataplane.engines.replay.memory import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.models import ReplayModel
from dataplane.engines.replay.weights import WeightsMemory
from dataplane.scheduling.schedule import Turn


def pool_stats(
    *,
    now_s: float,
    turn: Turn | None,
    load: float,
    weights: WeightsMemory,
    kv: ReplayKvMemory,
    requests: RequestTable[SequenceKv],
    log: TurnLog,
    relief: KvRelief[ReplayModel, SequenceKv],
) -> PoolStats:
    """The state of the pool right now. A replay has no slabs: `slabs` are bytes."""
    all_kv = requests.all_kv
    moving = [one for one in all_kv if one.location in (KvLocation.SWAPPING_OUT, KvLocation.SWAPPING_IN)]
    return PoolStats(
        now_s=now_s,
        running_model=turn.model if turn else None,
        next_model=turn.next_model if turn else None,
        arriving_models=weights.arriving_models(now_s),
        load=load,
        prefills_waiting=sum(len(group.waiting) for group in requests.prefills.groups),
        slabs={
            "weights": weights.used_bytes - weights.lent_bytes,
            "kv": kv.used_bytes,
            "free": weights.free_bytes + kv.spare_bytes,
        },
        kv=_shapes((one.bytes_per_token, one.here_bytes, one in moving) for one in all_kv),
        host_kv=_shapes((one.bytes_per_token, one.host_bytes, one in moving) for one in all_kv),
        given_up=weights.given_up,
        relief=dict(relief.ways),
        not_remapped=dict(relief.refusals),
        layers_moved=dict(relief.layers),
        turns=tuple(log.turns),
        prefill_pace=log.prefill_pace,
    )


def _shapes(kept: Iterable[tuple[int, int, bool]]) -> tuple[KvShapeStats, ...]:
    """By bytes per token; of each KV how many bytes there are, and whether they are moving."""
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
