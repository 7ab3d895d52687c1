"""Shares of tenants' limits by region, where each region counts in a Redis of its own. Granted in one transaction for a
tenant, by this database's clock; see `policies.limit_shares`.
"""

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime

from sqlalchemy import CheckConstraint, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.policies.limit_shares import LimitShare, ShareReport, choose_limit_share
from controlplane.policies.limits import Limit
from controlplane.settings import Settings
from controlplane.store.tables import Base
from controlplane.store.tenants import Tenant, limits_of


class LimitShareRow(Base):
    """What a region may use of one limit of a tenant; the columns are those of `LimitShare`."""

    __tablename__ = "limit_shares"
    __table_args__ = (
        CheckConstraint("0 <= floor AND floor <= granted AND granted <= held AND floor <= held_floor", name="held"),
    )
    tenant: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    granted: Mapped[int]
    floor: Mapped[int]
    held: Mapped[int]
    held_floor: Mapped[int]
    demand: Mapped[float]
    ends_at: Mapped[datetime]
    version: Mapped[int]


Reports = Mapping[str, Mapping[Limit, ShareReport]]
"""What a region says, by tenant and limit."""
Grants = dict[str, dict[Limit, LimitShare]]
_SAME = [field.name for field in fields(LimitShare) if field.name not in {"region", "ends_s"}]


def grant_shares(session: Session, region: str, reports: Reports, settings: Settings) -> Grants:
    """Grant a region its shares of the limits that it reports on, and that the tenant has."""
    tenants = sorted(reports)
    for tenant in tenants:  # in one order, so that two regions never wait for each other
        session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"tidepool:shares:{tenant}", 0))))
    now_s = session.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one()
    rows = {row.name: row for row in session.scalars(select(Tenant).where(Tenant.name.in_(tenants)))}
    shares = _read(session, tenants)
    grants: Grants = {}
    for tenant in tenants:
        limits = limits_of(rows.get(tenant), settings).by_kind()
        grants[tenant] = {
            kind: choose_limit_share(
                limits[kind],
                shares.get((tenant, kind), []),
                region,
                report,
                now_s=float(now_s),
                lease_s=settings.limit_share_lease_s,
            )
            for kind, report in reports[tenant].items()
            if kind in limits
        }
    _write(session, grants)
    return grants


def _read(session: Session, tenants: list[str]) -> dict[tuple[str, Limit], list[LimitShare]]:
    shares: dict[tuple[str, Limit], list[LimitShare]] = {}
    for row in session.scalars(select(LimitShareRow).where(LimitShareRow.tenant.in_(tenants))):
        same = {name: getattr(row, name) for name in _SAME}
        share = LimitShare(region=row.region, ends_s=row.ends_at.timestamp(), **same)
        shares.setdefault((row.tenant, Limit(row.kind)), []).append(share)
    return shares


def _write(session: Session, grants: Grants) -> None:
    rows = [
        {
            "tenant": tenant,
            "kind": kind.value,
            "region": share.region,
            "ends_at": datetime.fromtimestamp(share.ends_s, UTC),
            **{name: getattr(share, name) for name in _SAME},
        }
        for tenant, kinds in grants.items()
        for kind, share in kinds.items()
    ]
    if rows:
        added = insert(LimitShareRow)
        values = {name: added.excluded[name] for name in (*_SAME, "ends_at")}
        session.execute(added.on_conflict_do_update(constraint="pk_limit_shares", set_=values), rows)


def shares_of(session: Session, tenant: str) -> list[LimitShareRow]:
    """A tenant's shares by limit and region."""
    order = (LimitShareRow.kind, LimitShareRow.region)
    return list(session.scalars(select(LimitShareRow).where(LimitShareRow.tenant == tenant).order_by(*order)))
