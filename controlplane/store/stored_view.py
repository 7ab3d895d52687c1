"""The live view as far as Postgres knows it, for a gateway that starts while Redis is away."""

from datetime import timedelta

from msgspec import structs
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import InstanceState
from controlplane.store.adapters import adapter_instance_id, served_with
from controlplane.store.redis.live import FleetView, NodeView
from controlplane.store.session import server_time_s
from controlplane.store.tables import Desired, Instance, Node
from dataplane.protocol.messages import Heartbeat, InstanceReport
from dataplane.protocol.tiers import InstanceKind


def stored_view(session: Session, *, heard_s: float) -> FleetView:
    """Nodes with a heartbeat in the last `heard_s` seconds, and their ready instances. Only Redis has their load: they
    count as full with unknown waits, so interactive requests are sent there and deferred ones are not. Whether an
    instance serves the adapters of its model as well is tried: only its node knows.
    """
    heard = Node.last_seen_at > func.now() - timedelta(seconds=heard_s)
    ready = (Instance.desired == Desired.RUNNING) & (Instance.observed == InstanceState.READY)
    query = select(Node, Instance).join(Instance, Instance.node == Node.name).where(heard, ready)
    found: dict[str, tuple[Node, list[InstanceReport]]] = {}
    rows = session.execute(query).all()
    adapters = served_with(session, {instance.model for _, instance in rows})
    for node, instance in rows:
        report = InstanceReport(
            instance_id=instance.id,
            model=instance.model,
            slot=instance.slot,
            state="ready",
            kind=InstanceKind(instance.kind),
            pooled=instance.pooled,
        )
        beside = (
            structs.replace(
                report, instance_id=adapter_instance_id(instance.id, adapter), model=adapter.name, host=instance.id
            )
            for adapter in adapters.get(instance.model, ())
        )
        found.setdefault(node.name, (node, []))[1].extend((report, *beside))
    now_s = server_time_s(session)
    views = {
        name: NodeView(
            region=node.region,
            gpu_type=node.gpu_type,
            url=node.url,
            received_s=now_s,
            heartbeat=Heartbeat(node=name, boot_id="", generation=node.generation, instances=tuple(reports)),
        )
        for name, (node, reports) in found.items()
    }
    return FleetView(read_s=now_s, nodes=views)
