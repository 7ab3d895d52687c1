"""What `/state` shows: a node's pools, slots, queues and memory, and the turns of each slot as a timeline."""

from typing import Any

import msgspec

from dataplane.agent.node import Agent
from dataplane.agent.worker_groups import Pool
from dataplane.agent.workers import Slot
from dataplane.engines.interface import KvShapeStats, PoolStats


def node_state(agent: Agent, now_s: float) -> dict[str, Any]:
    """The document, ready to be encoded. `now_s` is by `time.monotonic`; ages are in seconds before it. Pools are in
    the order in which the control plane numbers them, as slots; `slots` are the agent's own, of one worker each.
    """
    slots = [_slot_state(slot, pool, now_s) for pool in agent.pools for slot in pool.slots]
    return {
        "heartbeat": agent.heartbeat(),
        "pools": [_pool_state(pool) for pool in agent.pools],
        "slots": sorted(slots, key=lambda slot: int(slot["slot"])),
    }


def _pool_state(pool: Pool) -> dict[str, Any]:
    return {
        "slots": [slot.index for slot in pool.slots],
        "in_flight": len(pool.dispatcher),
        "waiting_for_a_slot": pool.dispatcher.count(None),
        "handovers_total": pool.dispatcher.handovers_total,
    }


def _slot_state(slot: Slot, pool: Pool, now_s: float) -> dict[str, Any]:
    groups = pool.dispatcher.queue(slot.index).groups
    stats = slot.stats
    return {
        "slot": slot.index,
        "kind": slot.kind,
        "engine": slot.engine,
        "gpus": slot.gpus,
        "pid": slot.pid,
        "restarts_total": slot.restarts_total,
        "in_flight": pool.dispatcher.count(slot.index),
        "load": slot.load,
        "resident_models": stats.resident_models,
        "steps_total": stats.steps_total,
        "tokens_total": stats.tokens_total,
        "switches_total": slot.switches_total,
        "preemptions_total": slot.preemptions_total,
        "instances": stats.instances,
        "fetches": {
            instance_id: {"done_bytes": fetch.done_bytes, "total_bytes": fetch.total_bytes}
            for instance_id, fetch in slot.fetches().items()
        },
        "prefill_groups": [
            {
                "model": group.model,
                "admitted": group.admitted,
                "waiting": [request.request_id for request in group.waiting],
            }
            for group in groups
        ],
        "pool": None if stats.pool is None else _switching_state(stats.pool, now_s - slot.stats_heard_s),
    }


def _switching_state(pool: PoolStats, heard_age_s: float) -> dict[str, Any]:
    """What runs, what comes, what is where. `heard_age_s` ago it was so."""
    document: dict[str, Any] = msgspec.to_builtins(pool)
    del document["now_s"]
    engine_now_s = pool.now_s + heard_age_s
    return document | {
        "age_s": heard_age_s,
        "kv": [_shape_state(shape) for shape in pool.kv],
        "host_kv": [_shape_state(shape) for shape in pool.host_kv],
        "turns": [
            {
                "kind": turn.kind,
                "model": turn.model,
                "started_age_s": engine_now_s - turn.started_s,
                "ended_age_s": engine_now_s - turn.ended_s,
                "tokens": turn.tokens,
                "prompt_tokens": turn.prompt_tokens,
                "switched": turn.switched,
            }
            for turn in pool.turns
        ],
    }


def _shape_state(shape: KvShapeStats) -> dict[str, Any]:
    fragmentation = 1 - shape.used_bytes / shape.held_bytes if shape.held_bytes else 0.0
    document: dict[str, Any] = msgspec.to_builtins(shape)
    return document | {"fragmentation": fragmentation}
