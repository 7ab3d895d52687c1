"""Tenants: their limits, and the tokens that their batches have queued. These are counted, never kept: what ended is
refunded by having ended.
"""

from collections.abc import Collection
from dataclasses import fields
from datetime import datetime

from sqlalchemy import CheckConstraint, delete, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.policies.limits import TenantLimits
from controlplane.settings import Settings
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.tables import Base, Owned


class Tenant(Owned, Base):
    """What a tenant may use; null: without limit. A tenant without a row has the limits of the settings."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("requests_per_minute > 0 AND tokens_per_minute > 0 AND concurrent_max > 0", name="positive"),
        CheckConstraint("queued_batch_tokens_max >= 0", name="queued_positive"),
        CheckConstraint("tokens_per_day > 0 AND tokens_per_month > 0 AND tokens_total > 0", name="budgets_positive"),
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrent_max: Mapped[int | None]
    queued_batch_tokens_max: Mapped[int | None]
    tokens_per_day: Mapped[int | None]
    tokens_per_month: Mapped[int | None]
    tokens_total: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


def limits_of(row: Tenant | None, settings: Settings) -> TenantLimits:
    """A tenant's limits: its row's, or where it has none the defaults."""
    source, prefix = (settings, "tenant_") if row is None else (row, "")
    return TenantLimits(**{field.name: getattr(source, prefix + field.name) for field in fields(TenantLimits)})


def find_tenant(session: Session, name: str) -> Tenant | None:
    """A tenant's own limits, locked; None: it has none, and nobody else gives it some until this transaction ends."""
    row = session.get(Tenant, name, with_for_update=True)
    if row is not None:
        return row
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"tidepool:limits of tenant:{name}", 0))))
    return session.get(Tenant, name, with_for_update=True)


def put_tenant(session: Session, row: Tenant) -> Tenant:
    """Give a tenant limits of its own; null in them is no limit."""
    kept = session.merge(row)
    session.flush()
    session.refresh(kept)
    return kept


def delete_tenant(session: Session, name: str) -> None:
    """Take a tenant's own limits away."""
    session.execute(delete(Tenant).where(Tenant.name == name))


def queued_batch_tokens(session: Session, tenant: str) -> int:
    """Tokens that the requests of a tenant's batches may still take: those that have not ended."""
    return sum(_queued_tokens(session, tenant).values())


def _queued_tokens(session: Session, tenant: str, *, besides: Collection[int] = ()) -> dict[int, int]:
    """By the number of the batch; none of those `besides`."""
    rows = session.execute(
        select(Batch.number, func.sum(QueuedRequest.tokens))
        .join(QueuedRequest, Batch.number == QueuedRequest.batch_number)
        .where(Batch.tenant == tenant, Batch.ended_at.is_(None), Batch.number.not_in(besides))
        .group_by(Batch.number)
    )
    return {number: int(tokens) for number, tokens in rows}


def batch_tokens_left(
    session: Session, tenant: str, settings: Settings, *, besides: Collection[int] = ()
) -> int | None:
    """Tokens that a tenant's batches, `besides` those of these numbers, leave to be queued; None: without limit. Where
    there is one, no other batch of the tenant is accepted until this transaction ends, so two at once cannot both take
    the last of it.
    """
    most = limits_of(session.get(Tenant, tenant), settings).queued_batch_tokens_max
    if most is None:
        return None
    # they only get fewer: under the lock only what came since is counted
    before = _queued_tokens(session, tenant, besides=besides)
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"tidepool:tenant:{tenant}", 0))))
    since = _queued_tokens(session, tenant, besides={*besides, *before})
    return most - sum(before.values()) - sum(since.values())
