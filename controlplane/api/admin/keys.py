"""API keys and the audit."""

from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks, Query
from fastapi import Body as BodyParam
from pydantic import AwareDatetime, Field

from controlplane.api.admin.changes import audited
from controlplane.api.admin.fields import After, AfterId, Answer, FilterWord, KeyPath, Limit, NodeName, PageOf, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import MAY, Admin, Viewer, notify_gateways
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import Body, KeyName, ModelName, Tenant, name_fault
from controlplane.errors import InvalidValueError
from controlplane.store import keys
from controlplane.store.console import end_links, end_sessions_of_key
from controlplane.store.keys import ApiKey, KeyScope
from controlplane.store.rows import list_rows
from controlplane.store.tables import Role

EXPIRES_DAYS_MAX = 3650
MODELS_MAX = 1000
OVERLAP_S_MAX = 30 * 86_400
router = APIRouter(tags=["admin: keys"], route_class=IdempotentRoute)


class KeyRequest(Body):
    """A key to make."""

    name: KeyName
    role: Role = Field(examples=["client"])
    tenant: Tenant = Field("default", description="whose files and batches the key sees")
    expires_in_days: Annotated[int, Field(strict=True, ge=1, le=EXPIRES_DAYS_MAX)] | None = None
    scopes: Annotated[list[KeyScope], Field(min_length=1)] | None = Field(
        None, description="parts of /v1 that the key is for; null: all that its role may use"
    )
    models: Annotated[list[ModelName], Field(min_length=1, max_length=MODELS_MAX)] | None = Field(
        None, description="models that the key is for; null: all"
    )
    node: NodeName | None = Field(None, description="the only node that a node's key speaks for")

    def check(self, *, unbound: bool) -> None:
        """Raise InvalidValueError where the narrowing does not fit the role, or no node may have the name."""
        narrowed = "scopes" if self.scopes is not None else "models" if self.models is not None else None
        if narrowed is not None and self.role not in MAY[Role.CLIENT]:
            raise InvalidValueError(f"{narrowed}: the role '{self.role.value}' does not use /v1", param=narrowed)
        if self.node is not None and self.role != Role.NODE:
            raise InvalidValueError("node: only keys of the role 'node' are for a node", param="node")
        if self.node is not None and (fault := name_fault(self.node)) is not None:
            raise InvalidValueError(f"node: {fault}", param="node")
        if self.node is None and self.role == Role.NODE and not unbound:
            raise InvalidValueError("node: a node's key needs the node that it speaks for", param="node")


class Rotation(Body):
    """How a key gets its new secret."""

    overlap_s: Annotated[int, Field(strict=True, ge=0, le=OVERLAP_S_MAX)] = Field(
        3600, description="for how long the present secret works still"
    )


class Key(Answer):
    """A key without its secret."""

    id: str = Field(examples=["key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    name: str = Field(examples=["dashboard"])
    tenant: str = Field(examples=["default"])
    role: Role
    prefix: str = Field(description="how its secret begins", examples=["tp-viewer-Xy3q"])
    scopes: list[KeyScope] | None = Field(description="null: all that its role may use")
    models: list[str] | None = Field(description="null: all")
    node: str | None = Field(description="the only node that it speaks for")
    old_until: datetime | None = Field(description="until when the secret before the last rotation works")
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
    return page_of(Key, list_rows(session, ApiKey, after=after, limit=limit))


@router.post("/keys", summary="Make a key", status_code=201)
def create_key(request: KeyRequest, session: SessionDep, state: StateDep, caller: Admin) -> MadeKey:
    """The secret is in the answer and nowhere else; only its hash is stored."""
    request.check(unbound=state.settings.node_keys_unbound)
    days = request.expires_in_days
    made = keys.make_key(
        session,
        name=request.name,
        role=request.role,
        tenant=request.tenant,
        lasts=None if days is None else timedelta(days=days),
        scopes=request.scopes,
        models=request.models,
        node=request.node,
    )
    after = keys.snapshot(made.row)
    keys.record(session, actor=caller.name, action="key.create", subject=made.row.id, after=after)
    return MadeKey(**after, secret=made.secret)


@router.delete("/keys/{key_id}", summary="Revoke a key")
def revoke_key(
    key_id: KeyPath, session: SessionDep, state: StateDep, caller: Admin, after_commit: BackgroundTasks
) -> Key:
    """The key stops working within seconds, everywhere, and console sessions and sign-in links of it end. The last
    admin key cannot be revoked (409).
    """
    row, is_new = keys.revoke_key(session, key_id)
    after = keys.snapshot(row)
    if is_new:
        before = after | {"revoked_at": None}
        keys.record(session, actor=caller.name, action="key.revoke", subject=key_id, before=before, after=after)
    after_commit.add_task(notify_gateways, state, hashes_of(row) | end_sessions_of_key(session, key_id))
    return Key(**after)


@router.post("/keys/{key_id}/rotate", summary="Give a key a new secret")
def rotate_key(
    key_id: KeyPath,
    rotation: Annotated[Rotation, BodyParam(default_factory=Rotation)],
    session: SessionDep,
    state: StateDep,
    caller: Admin,
    after_commit: BackgroundTasks,
) -> MadeKey:
    """The key keeps its id and rights. The present secret works for `overlap_s` more; one that a rotation before left
    working ends now. Console sessions and sign-in links of the key end when the present secret does. 409 where the key
    is revoked or has expired.
    """
    known = hashes_of(keys.get_key(session, key_id))
    with audited(session, caller, "key.rotate", ApiKey, key_id):
        made = keys.rotate_key(session, key_id, overlap_s=rotation.overlap_s)
    still_good = hashes_of(made.row) if rotation.overlap_s else {made.row.secret_hash}
    end_links(session, key_id, after_s=rotation.overlap_s)
    ended = end_sessions_of_key(session, key_id, after_s=rotation.overlap_s)
    after_commit.add_task(notify_gateways, state, (known - still_good) | ended)
    return MadeKey(**keys.snapshot(made.row), secret=made.secret)


def hashes_of(row: ApiKey) -> set[str]:
    """Of the secrets that a key has, for `notify_gateways`."""
    return {hashed for hashed in (row.secret_hash, row.old_secret_hash) if hashed is not None}


@router.get("/audit", summary="List changes")
def list_audit(
    session: SessionDep,
    _: Viewer,
    actor: FilterWord = None,
    kind: FilterWord = None,
    subject: FilterWord = None,
    since: Annotated[AwareDatetime | None, Query(description="changes from then on")] = None,
    limit: Limit = 20,
    after: AfterId = None,
) -> PageOf[AuditEvent]:
    """Every change, the newest first; `kind` is what an action begins with, up to its dot."""
    page = keys.list_audit(session, actor=actor, kind=kind, subject=subject, since=since, after=after, limit=limit)
    return page_of(AuditEvent, page)
