"""The document of `/state`: a node's worker groups, workers, queues and memory, and each worker's time slices."""

from typing import Any

import msgspec

from dataplane.agent.node import Agent
from dataplane.agent.worker_groups import WorkerGroup
from dataplane.agent.workers import WorkerSupervisor
from dataplane.engines.interface import KvShapeStats, PoolStats

_FORMER_KEYS = {"given_up": "offloaded_layers", "relief": "pressure_actions", "not_remapped": "offloads_declined"}
"""Keys that the next release no longer has, and the keys that replace them."""


def node_state(agent: Agent, now_s: float) -> dict[str, Any]:
    """The document, ready to be encoded. `now_s` is by `time.monotonic`; ages are in seconds before it. `pools` are the
    worker groups, in the order in which the control plane numbers them as slots; `slots` are the workers.
    """
    workers = [_worker_state(worker, group, now_s) for group in agent.groups for worker in group.workers]
    return {
        "heartbeat": agent.heartbeat(),
        "pools": [_group_state(group) for group in agent.groups],
        "slots": sorted(workers, key=lambda worker: int(worker["slot"])),
    }


def _group_state(group: WorkerGroup) -> dict[str, Any]:
    return {
        "slots": [worker.index for worker in group.workers],
        "in_flight": len(group.dispatcher),
        "waiting_for_a_slot": group.dispatcher.count(None),
        "handovers_total": group.dispatcher.handovers_total,
    }


def _worker_state(worker: WorkerSupervisor, group: WorkerGroup, now_s: float) -> dict[str, Any]:
    stats = worker.stats
    return {
        "slot": worker.index,
        "kind": worker.kind,
        "engine": worker.engine,
        "gpus": worker.gpus,
        "ranks": worker.ranks,
        "hosts": worker.host_states,
        "pid": worker.pid,
        "restarts_total": worker.restarts_total,
        "in_flight": group.dispatcher.count(worker.index),
        "load": worker.load,
        "resident_models": stats.resident_models,
        "steps_total": stats.steps_total,
        "tokens_total": stats.tokens_total,
        "switches_total": worker.switches_total,
        "preemptions_total": worker.preemptions_total,
        "instances": stats.instances,
        "fetches": {
            instance_id: {"done_bytes": fetch.done_bytes, "total_bytes": fetch.total_bytes}
            for instance_id, fetch in worker.hosted.fetches().items()
        },
        "prefill_groups": [
            {
                "model": prefills.model,
                "admitted": prefills.admitted,
                "waiting": [request.request_id for request in prefills.waiting],
            }
            for prefills in group.dispatcher.queue(worker.index).groups
        ],
        "pool": None if stats.pool is None else _pool_state(stats.pool, now_s - worker.stats_s),
    }


def _pool_state(pool: PoolStats, age_s: float) -> dict[str, Any]:
    """The models and memory of a worker, as it reported them `age_s` ago."""
    document: dict[str, Any] = msgspec.to_builtins(pool)
    del document["now_s"], document["time_slices"]  # by the engine's clock; `turns` has the ages
    document |= {former: document[key] for former, key in _FORMER_KEYS.items()}
    engine_now_s = pool.now_s + age_s
    return document | {
        "age_s": age_s,
        "kv": [_shape_state(shape) for shape in pool.kv],
        "host_kv": [_shape_state(shape) for shape in pool.host_kv],
        "turns": [
            {
                "kind": turn.kind,
                "model": turn.model,
                "started_age_s": engine_now_s - turn.started_s,
                "ended_age_s": engine_now_s - turn.ended_s,
                "tokens": turn.tokens,
                "prompts": turn.prompts,
                "prompt_tokens": turn.prompt_tokens,
                "switched": turn.switched,
            }
            for turn in pool.time_slices
        ],
    }


def _shape_state(shape: KvShapeStats) -> dict[str, Any]:
    fragmentation = 1 - shape.used_bytes / shape.held_bytes if shape.held_bytes else 0.0
    document: dict[str, Any] = msgspec.to_builtins(shape)
    return document | {"fragmentation": fragmentation}
