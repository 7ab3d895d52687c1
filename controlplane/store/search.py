"""Things of the fleet by a part of their name."""

from collections.abc import Mapping
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session

from controlplane.store.tables import Model, Node, Region
from controlplane.store.tenants import Tenant

Kind = Literal["model", "region", "node", "tenant"]
_NAMES: Mapping[Kind, InstrumentedAttribute[str]] = {
    "model": Model.name,
    "region": Region.name,
    "node": Node.name,
    "tenant": Tenant.name,
}


def find_names(session: Session, words: str, *, limit: int) -> list[tuple[Kind, str]]:
    """Kind and name of what contains `words`, in any case: of each kind at most `limit`, those that begin so first."""
    return [
        (kind, name)
        for kind, column in _NAMES.items()
        for name in session.scalars(
            select(column)
            .where(column.icontains(words, autoescape=True))
            .order_by(~column.istartswith(words, autoescape=True), column)
            .limit(limit)
        )
    ]
