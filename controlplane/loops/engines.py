"""Engines: what each running instance is told to run on. The scale loop calls it, under the fleet's lock."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from controlplane.policies.engines import EngineFacts, choose_engine, choose_engine_changes
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import InstanceState
from controlplane.store.fleet import Census
from controlplane.store.instances import touch_generations
from controlplane.store.keys import record
from controlplane.store.tables import Desired, Instance


def settle_engines(session: Session, census: Census, *, actor: str, now_s: float, steady_s: float) -> int:
    """Give every running instance its engine, new ones included. Returns how many have to move for that. One that came
    up or moved less than `steady_s` ago, so that its node may not have said the last of it, holds up the next move.
    """
    running = select(Instance).where(Instance.desired == Desired.RUNNING).order_by(Instance.id)
    instances = {instance.id: instance for instance in session.scalars(running)}
    facts = _facts(census, list(instances.values()), steady_since_s=now_s - steady_s)
    for each in facts:
        instances[each.instance_id].engine_reason = choose_engine(each).reason
    changes = choose_engine_changes(facts)
    touch_generations(session, sorted({instances[change.instance_id].node for change in changes}))
    for change in changes:
        instance = instances[change.instance_id]
        if change.moves:
            before, after = {"engine": instance.engine}, vars(change.decision)
            record(session, actor=actor, action="instance.move", subject=instance.id, before=before, after=after)
            instance.changed_at = func.now()
        instance.engine = change.decision.engine
    return sum(change.moves for change in changes)


def _facts(census: Census, instances: list[Instance], *, steady_since_s: float) -> list[EngineFacts]:
    asked = {model.name: model.engine for model in census.models}
    prefers = {node.name: node.engine for node in census.nodes}
    gpus = {(slot.node, slot.index): slot.gpus for slot in census.slots}
    rates = {(profile.model, profile.gpu_type): profile.engine_rates or {} for profile in census.profiles}
    return [
        EngineFacts(
            instance_id=instance.id,
            endpoint=Endpoint(model=instance.model, region=instance.region),
            engine=instance.engine,
            asked=asked[instance.model],
            node_prefers=prefers[instance.node],
            pooled=instance.pooled,
            whole_slot=instance.gpus == gpus[instance.node, instance.slot],
            ready=instance.observed == InstanceState.READY,
            steady=instance.observed == InstanceState.READY and instance.changed_at.timestamp() <= steady_since_s,
            rates=rates.get((instance.model, instance.gpu_type), {}),
        )
        for instance in instances
    ]
