"""What a heartbeat says of the workers that several models share."""

import time
from collections.abc import Iterable, Sequence
from statistics import median

from dataplane.agent.worker_groups import WorkerGroup
from dataplane.agent.workers import WorkerSupervisor
from dataplane.engines.interface import PoolStats, TimeSlice
from dataplane.protocol.pool_reports import KvReport, PoolReport, RunReport, SwitchReport

RUNS_MAX = 16
RUNS_S = 5.0
"""Heartbeats are a second apart: one that is lost hides nothing."""
SWITCHES_S = 60.0


def pool_reports(groups: Iterable[WorkerGroup]) -> tuple[PoolReport, ...]:
    """The workers of all groups that host several instances, not counting adapters that one of them serves, by slot;
    their statistics are what they reported last.
    """
    now_s = time.monotonic()
    return tuple(
        _report(group.number, worker, worker.stats.pool, now_s - worker.stats_s)
        for group in groups
        for worker in group.workers
        if worker.stats.pool is not None
        and sum(group.host_of(one.instance_id) is None for one in worker.stats.instances) > 1
    )


def runs_of(slices: Iterable[TimeSlice], now_s: float) -> tuple[RunReport, ...]:
    """The last runs, of the last seconds before `now_s` on the engine's clock: one for all time slices of a model that
    follow each other.
    """
    runs: list[tuple[str, float, float, bool]] = []
    for each in slices:
        if now_s - each.ended_s > RUNS_S:
            continue
        if runs and runs[-1][0] == each.model and not each.switched:
            model, began_s, _, switched = runs.pop()
            runs.append((model, began_s, each.ended_s, switched))
        else:
            runs.append((each.model, each.started_s, each.ended_s, each.switched))
    return tuple(
        RunReport(model, round(now_s - began_s, 3), round(ended_s - began_s, 3), switched)
        for model, began_s, ended_s, switched in runs[-RUNS_MAX:]
    )


def switches_of(slices: Sequence[TimeSlice], now_s: float) -> SwitchReport | None:
    """The switches of the last minute before `now_s` on the engine's clock, or since the oldest of the slices, if that
    began later; None: there is no slice.
    """
    if not slices:
        return None
    window_s = min(SWITCHES_S, now_s - slices[0].started_s)
    costs_s = [each.switch_s for each in slices if each.switched and each.started_s >= now_s - window_s]
    return SwitchReport(
        window_s=round(window_s, 3),
        switches=len(costs_s),
        median_s=round(median(costs_s), 6) if costs_s else 0.0,
        total_s=round(sum(costs_s), 6),
    )


def _report(slot: int, worker: WorkerSupervisor, pool: PoolStats, age_s: float) -> PoolReport:
    return PoolReport(
        slot=slot,
        worker=worker.index,
        kind=worker.kind,
        running_model=pool.running_model,
        next_model=pool.next_model,
        resident_models=worker.stats.resident_models,
        load=worker.load,
        switches_total=worker.switches_total,
        prefills_waiting=pool.prefills_waiting,
        slabs=pool.slabs,
        kv=tuple(KvReport(each.shape, each.used_bytes, each.held_bytes) for each in pool.kv),
        offloaded_layers=pool.offloaded_layers,
        runs=runs_of(pool.time_slices, pool.now_s + age_s),
        switching=switches_of(pool.time_slices, pool.now_s + age_s),
    )
