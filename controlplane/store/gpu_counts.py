"""What the GPUs of each region do."""

from collections.abc import Mapping

from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from controlplane.store.fleet import heard_of
from controlplane.store.tables import Desired, Instance, Node, Slot

USES = ("dedicated", "pooled", "spot", "free", "lost")


def read_gpu_counts(session: Session, *, alive_s: float) -> Mapping[str, Mapping[str, int]]:
    """GPUs by region and use. A pooled slot's GPUs count as pooled, whoever runs there; those of a node that sent no
    heartbeat in the last `alive_s` seconds are lost.
    """
    of_slot = and_(Instance.node == Slot.node, Instance.slot == Slot.index, Instance.desired != Desired.STOPPED)
    taken = func.coalesce(func.sum(Instance.gpus).filter(Instance.desired != Desired.SPOT), 0)
    lent = func.coalesce(func.sum(Instance.gpus).filter(Instance.desired == Desired.SPOT), 0)
    slots = (
        select(
            Node.region,
            Slot.gpus,
            heard_of(alive_s).label("alive"),
            func.coalesce(func.bool_or(Instance.pooled), False).label("pooled"),
            taken.label("taken"),
            lent.label("lent"),
        )
        .select_from(Slot)
        .join(Node, Node.name == Slot.node)
        .outerjoin(Instance, of_slot)
        .group_by(Node.region, Node.name, Slot.node, Slot.index)
        .subquery()
    )
    own = and_(slots.c.alive, ~slots.c.pooled)
    sums = {
        "dedicated": case((own, slots.c.taken), else_=0),
        "pooled": case((and_(slots.c.alive, slots.c.pooled), slots.c.gpus), else_=0),
        "spot": case((own, slots.c.lent), else_=0),
        "free": case((own, slots.c.gpus - slots.c.taken - slots.c.lent), else_=0),
        "lost": case((slots.c.alive, 0), else_=slots.c.gpus),
    }
    rows = session.execute(select(slots.c.region, *(func.sum(sums[use]) for use in USES)).group_by(slots.c.region))
    return {region: dict(zip(USES, map(int, counts), strict=True)) for region, *counts in rows}
