"""The engine of each running instance. Scaling calls this under the fleet's lock."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy.orm import Session

from controlplane.policies.assignment.facts import SlotRef
from controlplane.policies.engines import (
    TORCH,
    VLLM,
    EngineFacts,
    EngineSettings,
    choose_engine,
    choose_engine_changes,
    is_engines_fault,
)
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store.engine_failures import engine_failures, note_engine_failure
from controlplane.store.fleet import FleetInventory, read_inventory
from controlplane.store.instances import live_instances, running_instances, set_engine, touch_generations
from controlplane.store.keys import record
from controlplane.store.tables import Desired, Instance, Model
from dataplane.protocol.messages import EngineChoice


def send_back_failed(session: Session, settings: Settings, *, actor: str, now_s: float) -> int:
    """Count instances that failed on their engines, and choose another engine for them where there is one to return to;
    returns how many failed. This precedes scaling, which would replace them. Reports that are younger than
    `heartbeat_stale_s` may be of the engine before, and are ignored.
    """
    failed = [
        instance
        for instance in running_instances(session, observed=InstanceState.FAILED)
        if instance.changed_at.timestamp() <= now_s - settings.heartbeat_stale_s
        and is_engines_fault(instance.engine, instance.came_from)
    ]
    if not failed:
        return 0
    for instance in failed:
        noted = note_engine_failure(session, instance, forget_s=2 * settings.engine_retry_max_s)
        if noted is not None:
            record(session, actor=actor, action="engine.fail", subject=instance.id, after=noted)
    inventory = read_inventory(session, silent_s=settings.heartbeat_stale_s)
    _settle(session, failed, inventory, settings, actor=actor, now_s=now_s)
    return len(failed)


def settle_engines(session: Session, inventory: FleetInventory, settings: Settings, *, actor: str, now_s: float) -> int:
    """Choose the engine of every running instance, new ones included. Returns how many have to move for that. An
    instance that became ready or moved less than `heartbeat_stale_s` ago, whose report may be outdated, delays the next
    move of its endpoint.
    """
    return _settle(session, running_instances(session), inventory, settings, actor=actor, now_s=now_s)


def _settle(
    session: Session,
    instances: Sequence[Instance],
    inventory: FleetInventory,
    settings: Settings,
    *,
    actor: str,
    now_s: float,
) -> int:
    rows = {instance.id: instance for instance in instances}
    limits = EngineSettings(retry_s=settings.engine_retry_s, retry_max_s=settings.engine_retry_max_s)
    facts = _facts(session, inventory, instances, steady_since_s=now_s - settings.heartbeat_stale_s)
    wanted = [(each, choose_engine(each, now_s, limits)) for each in facts]
    changes = choose_engine_changes(wanted)
    touch_generations(session, sorted({rows[change.instance_id].node for change in changes}))
    for each, decision in wanted:
        rows[each.instance_id].engine_reason = decision.reason
    for change in changes:
        instance = rows[change.instance_id]
        if change.moves or instance.observed == InstanceState.FAILED:
            before, after = {"engine": instance.engine}, vars(change.decision)
            record(session, actor=actor, action="instance.move", subject=instance.id, before=before, after=after)
        set_engine(instance, change.decision.engine, moves=change.moves)
    return sum(change.moves for change in changes)


def _asked(model: Model) -> EngineChoice:
    """What the operator chose; a model that does not generate runs on torch otherwise."""
    return TORCH if model.engine == "auto" and model.task != "generate" else model.engine


def _facts(
    session: Session, inventory: FleetInventory, instances: Iterable[Instance], *, steady_since_s: float
) -> list[EngineFacts]:
    asked = {model.name: _asked(model) for model in inventory.models}
    live = live_instances(session)
    families = _vllm_families(live, inventory, asked)
    draining = {(each.node, each.slot) for each in live if each.pooled and each.desired == Desired.DRAINING}
    prefers = {node.name: node.engine for node in inventory.nodes}
    slots = {(slot.node, slot.index): slot for slot in inventory.slots}
    rates: Mapping[tuple[str, str], Mapping[str, float]] = {
        (profile.model, profile.gpu_type): profile.engine_rates or {} for profile in inventory.profiles
    }
    failures = engine_failures(session)
    return [
        EngineFacts(
            instance_id=instance.id,
            endpoint=Endpoint(model=instance.model, region=instance.region),
            engine=instance.engine,
            came_from=instance.came_from,
            asked=asked[instance.model],
            node_prefers=prefers[instance.node],
            slot=(instance.node, instance.slot),
            pooled=instance.pooled,
            gpus=instance.gpus,
            whole_slot=instance.gpus == slots[instance.node, instance.slot].gpus,
            workers=slots[instance.node, instance.slot].workers,
            family=(instance.node, instance.slot) in families,
            ready=instance.observed == InstanceState.READY,
            steady=instance.observed == InstanceState.READY
            and instance.changed_at.timestamp() <= steady_since_s
            and (instance.node, instance.slot) not in draining,
            rates=rates.get((instance.model, instance.gpu_type), {}),
            failures=failures.get((instance.model, instance.gpu_type), {}),
        )
        for instance in instances
    ]


def _vllm_families(
    live: Iterable[Instance], inventory: FleetInventory, asked: Mapping[str, EngineChoice]
) -> frozenset[SlotRef]:
    """The slots whose live instances are LoRA adapters of one base and perhaps that base, with vLLM asked for all."""
    bases = {model.name: model.base for model in inventory.models}
    here: dict[SlotRef, set[str]] = defaultdict(set)
    for instance in live:
        here[instance.node, instance.slot].add(instance.model)
    return frozenset(
        slot
        for slot, models in here.items()
        if any(bases[model] is not None for model in models)
        and len({bases[model] or model for model in models}) == 1
        and all(asked[model] == VLLM for model in models)
    )
