"""API keys and the audit."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from controlplane.api.admin.fields import (
    INT64_MAX,
    After,
    Answer,
    Body,
    KeyName,
    KeyPath,
    Limit,
    PageOf,
    Tenant,
    page_of,
)
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Admin, Viewer
from controlplane.api.state import SessionDep
from controlplane.store import keys
from controlplane.store.tables import Role

EXPIRES_DAYS_MAX = 3650
router = APIRouter(tags=["admin: keys"], route_class=IdempotentRoute)


class KeyRequest(Body):
    """A key to make."""

    name: KeyName
    role: Role = Field(examples=["client"])
    tenant: Tenant = Field("default", description="whose files and batches the key sees")
    expires_in_days: Annotated[int, Field(strict=True, ge=1, le=EXPIRES_DAYS_MAX)] | None = None


class Key(Answer):
    """A key without its secret."""

    id: str = Field(examples=["key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    name: str = Field(examples=["dashboard"])
    tenant: str = Field(examples=["default"])
    role: Role
    prefix: str = Field(description="how its secret begins", examples=["tp-viewer-Xy3q"])
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class MadeKey(Key):
    """A key just made."""

    secret: str | None = Field(
        description="shown this once and kept nowhere; null in the answer to a request repeated by its Idempotency-Key",
        examples=["tp-viewer-Xy3q6rT0c1n2m3b4v5c6x7z8a9s0d1f2g3h4j5k6l7q8"],
    )


class AuditEvent(Answer):
    """A change: who, what, and the row before and after."""

    id: int
    at: datetime
    actor: str = Field(description="the key's name", examples=["admin"])
    action: str = Field(examples=["region.put"])
    subject: str = Field(examples=["us-east"])
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@router.get("/keys", summary="List keys")
def list_keys(session: SessionDep, _: Admin, limit: Limit = 20, after: After = None) -> PageOf[Key]:
    """Keys by age, revoked ones too."""
    return page_of(Key, keys.list_keys(session, after=after, limit=limit), lambda row: row.id)


@router.post("/keys", summary="Make a key", status_code=201)
def create_key(request: KeyRequest, session: SessionDep, caller: Admin) -> MadeKey:
    """The secret is in the answer and nowhere else; only its hash is stored."""
    days = request.expires_in_days
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    made = keys.make_key(session, name=request.name, role=request.role, tenant=request.tenant, expires_at=expires_at)
    after = keys.snapshot(made.row)
    keys.record(session, actor=caller.name, action="key.create", subject=made.row.id, after=after)
    return MadeKey(**after, secret=made.secret)


@router.delete("/keys/{key_id}", summary="Revoke a key")
def revoke_key(key_id: KeyPath, session: SessionDep, caller: Admin) -> Key:
    """The key stops working within seconds. The last admin key cannot be revoked (409)."""
    present = keys.get_key(session, key_id)
    before = keys.snapshot(present)
    row = keys.revoke_key(session, key_id)
    if before["revoked_at"] is None:
        after = keys.snapshot(row)
        keys.record(session, actor=caller.name, action="key.revoke", subject=key_id, before=before, after=after)
    return Key.model_validate(row)


@router.get("/audit", summary="List changes")
def list_audit(
    session: SessionDep,
    _: Viewer,
    limit: Limit = 20,
    after: Annotated[int | None, Query(ge=1, le=INT64_MAX, description="`next` of the page before")] = None,
) -> PageOf[AuditEvent]:
    """Every change, the newest first."""
    return page_of(AuditEvent, keys.list_audit(session, after=after, limit=limit), lambda row: str(row.id))
