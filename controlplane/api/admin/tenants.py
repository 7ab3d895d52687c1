"""Tenants and what they may use."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from controlplane.api.admin.changes import audited
from controlplane.api.admin.fields import After, Answer, Limit, OwnedAnswer, Owner, PageOf, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Admin, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import Tenant, TenantChange
from controlplane.policies.token_budgets import Budget
from controlplane.store import tenants
from controlplane.store.limit_shares import shares_of
from controlplane.store.rows import list_rows
from controlplane.store.token_budgets import reserved_now

router = APIRouter(tags=["admin: keys"], route_class=IdempotentRoute)
TenantPath = Annotated[Tenant, Path(description="the tenant's name")]


class TenantLimits(Answer):
    """What a tenant may use."""

    name: str = Field(examples=["team-a"])
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_max: int | None
    queued_batch_tokens_max: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    tokens_total: int | None


class OwnLimits(TenantLimits, OwnedAnswer):
    """Limits that a tenant has of its own."""

    created_at: datetime


class LimitShare(Answer):
    """What a region may use of a tenant's limit, where limits are divided between regions."""

    limit: str = Field(validation_alias="kind", examples=["requests"])
    region: str = Field(examples=["north"])
    share: int = Field(validation_alias="granted", description="what it may use now; after `ends_at` its `floor`")
    held: int = Field(description="the most that it may still use until it said that it applies its share")
    floor: int = Field(description="what it may use while it cannot reach Postgres for longer than its share lasts")
    demand: float = Field(description="requests or tokens a minute that its callers lately asked for")
    ends_at: datetime = Field(description="until when it has the share, unless it asks again")


class TenantDetail(TenantLimits):
    """What a tenant may use, and what it has waiting."""

    is_default: bool = Field(description="whether these are the limits of the settings")
    queued_batch_tokens: int = Field(description="tokens of its batch requests that have not ended")
    tokens_reserved: dict[Budget, int] = Field(
        description="of its budgets, in their present periods: tokens that were used, or that gateways hold to be used"
    )
    shares: list[LimitShare] = Field(description="of its limits by region; none where all gateways share one Redis")


@router.get("/tenants", summary="List tenants with limits of their own")
def list_tenants(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[OwnLimits]:
    """Tenants by name; all others have the limits of the settings."""
    return page_of(OwnLimits, list_rows(session, tenants.Tenant, after=after, limit=limit))


@router.get("/tenants/{name}", summary="What a tenant may use")
def get_tenant(name: TenantPath, session: SessionDep, state: StateDep, _: Viewer) -> TenantDetail:
    """A tenant is a name that keys carry: one that nobody named yet has the limits of the settings."""
    row = tenants.find_tenant(session, name)
    limits = tenants.limits_of(row, state.settings)
    return TenantDetail(
        name=name,
        **asdict(limits),
        is_default=row is None,
        queued_batch_tokens=tenants.queued_batch_tokens(session, name),
        tokens_reserved=reserved_now(session, name, datetime.fromtimestamp(time.time(), UTC)),
        shares=[LimitShare.model_validate(share) for share in shares_of(session, name)],
    )


@router.put("/tenants/{name}", summary="Limit a tenant")
def put_tenant(
    name: TenantPath, change: TenantChange, session: SessionDep, caller: Admin, owner: Owner = None
) -> OwnLimits:
    """Counts across all gateways, within seconds. What runs goes on; what is queued already stays."""
    tenants.find_tenant(session, name)
    with audited(session, caller, "tenant.put", tenants.Tenant, name, owner=owner):
        row = tenants.put_tenant(session, tenants.Tenant(name=name, **change.model_dump()))
    return OwnLimits.model_validate(row)


@router.delete("/tenants/{name}", summary="Let a tenant have the default limits again")
def delete_tenant(name: TenantPath, session: SessionDep, state: StateDep, caller: Admin) -> TenantDetail:
    """Saying it again changes nothing."""
    tenants.find_tenant(session, name)
    with audited(session, caller, "tenant.delete", tenants.Tenant, name):
        tenants.delete_tenant(session, name)
    return get_tenant(name, session, state, caller)
