"""API keys, idempotency keys and the audit. A key's secret is shown once and kept only as its SHA-256; secrets hold
256 random bits, so a fast hash is enough."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import uuid_utils
from sqlalchemy import CheckConstraint, ColumnElement, Identity, ScalarSelect, and_, func, inspect, or_, select, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.errors import ConflictError
from controlplane.store.rows import Page, matching, page, require
from controlplane.store.session import defer
from controlplane.store.tables import Base, Json, Role, one_of
from controlplane.store.tenants import Tenant

_PREFIX_CHARS = 14


class KeyScope(StrEnum):
    """A part of `/v1`."""

    CHAT = "chat"
    FILES = "files"
    BATCH = "batch"
    MODELS = "models"


class ApiKey(Base):
    """A key, by the SHA-256 of its secret. Revoked keys stay for the audit. `scopes` and `models`: null is all of them;
    `node`: the only one it may act for; `old_secret_hash`: of the secret before a rotation, good until `old_until`.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        one_of("role", Role),
        CheckConstraint("node IS NULL OR role = 'node'", name="node_of_node_keys"),
        CheckConstraint("(old_secret_hash IS NULL) = (old_until IS NULL)", name="old_until_then"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    tenant: Mapped[str]
    role: Mapped[str]
    secret_hash: Mapped[str] = mapped_column(unique=True)
    prefix: Mapped[str]
    scopes: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    models: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    node: Mapped[str | None]
    old_secret_hash: Mapped[str | None] = mapped_column(unique=True)
    old_until: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditEvent(Base):
    """Who changed what, with the row before and after."""

    __tablename__ = "audit_events"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    before: Mapped[Json | None]
    after: Mapped[Json | None]


class IdempotencyKey(Base):
    """The answer already given to a POST with this key, so that a retry changes nothing. `api_key_id`: of the caller; a
    session's id where a person signed in without a key.
    """

    __tablename__ = "idempotency_keys"
    api_key_id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    status: Mapped[int | None]
    body: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key just made; `secret` is not to be had again."""

    row: ApiKey
    secret: str


def hash_secret(secret: str) -> str:
    """The form in which a secret is stored and looked up."""
    return hashlib.sha256(secret.encode()).hexdigest()


def make_key(
    session: Session,
    *,
    name: str,
    role: Role,
    tenant: str,
    lasts: timedelta | None = None,
    secret: str | None = None,
    scopes: Sequence[KeyScope] | None = None,
    models: Sequence[str] | None = None,
    node: str | None = None,
) -> NewKey:
    """Make a key, which `lasts` from now, on the database's clock; None: until it is revoked. A given `secret` (the
    bootstrap's) is taken as it is. `scopes`, `models`: None is all; `node`: the only node that it may act for.
    """
    secret = secret or _new_secret(role)
    made = insert(ApiKey).values(
        id=f"key_{uuid_utils.uuid7().hex}",
        name=name,
        tenant=tenant,
        role=role,
        secret_hash=hash_secret(secret),
        prefix=secret[:_PREFIX_CHARS],
        expires_at=None if lasts is None else func.now() + lasts,
        scopes=None if scopes is None else [scope.value for scope in scopes],
        models=None if models is None else list(models),
        node=node,
    )
    return NewKey(row=session.scalars(made.returning(ApiKey)).one(), secret=secret)


def _new_secret(role: Role) -> str:
    return f"tp-{role.value}-{secrets.token_urlsafe(32)}"


def find_key(session: Session, secret: str, *, lock: bool = False) -> ApiKey | None:
    """The key of this secret if it is neither revoked nor expired, and the secret not replaced. `lock`: it gets no
    other secret until the transaction ends, since a rotation would not see the session that begins with this one.
    """
    found = select(ApiKey).where(*_has_secret(hash_secret(secret)))
    return session.scalar(found.with_for_update(read=True, key_share=True) if lock else found)


def _has_secret(hashed: str) -> tuple[ColumnElement[bool], ...]:
    is_old = (ApiKey.old_secret_hash == hashed) & (ApiKey.old_until > func.now())
    return (ApiKey.secret_hash == hashed) | is_old, *is_good()


def replaced_secret_ends_at(secret: str | None) -> ScalarSelect[datetime | None]:
    """When a secret that a rotation has replaced ends; null for others, and for none."""
    is_old = ApiKey.old_secret_hash == hash_secret(secret or "")
    return select(ApiKey.old_until).where(is_old).scalar_subquery()


@dataclass(frozen=True, kw_only=True)
class FoundKey:
    """A good key, how long its secret is good for still (None: without end), and its tenant's row, if it has one."""

    row: ApiKey
    good_for_s: float | None
    tenant: Tenant | None


def find_with_tenant(session: Session, secret: str) -> FoundKey | None:
    """What a gateway must know of a caller; None where `find_key` finds none."""
    hashed = hash_secret(secret)
    with_tenant = select(ApiKey, Tenant, func.now()).outerjoin(Tenant, Tenant.name == ApiKey.tenant)
    found = session.execute(with_tenant.where(*_has_secret(hashed))).one_or_none()
    if found is None:
        return None
    row, tenant, now = found
    ends = [row.expires_at, row.old_until if row.old_secret_hash == hashed else None]
    lives_s = [(end - now).total_seconds() for end in ends if end is not None]
    return FoundKey(row=row, good_for_s=min(lives_s, default=None), tenant=tenant)


def rotate_key(session: Session, key_id: str, *, overlap_s: int) -> NewKey:
    """Give a key a new secret; the present one works for `overlap_s` more, the one before it no more.

    Raises:
        NotFoundError: no such key.
        ConflictError: it is revoked or has expired.
    """
    row = session.scalar(select(ApiKey).where(ApiKey.id == key_id, *is_good()).with_for_update())
    if row is None:
        get_key(session, key_id)
        raise ConflictError(f"key '{key_id}' is revoked or has expired; make a new one", param="key_id")
    secret = _new_secret(Role(row.role))
    now = session.scalar(select(func.now()))
    assert now is not None
    row.old_secret_hash, row.old_until = row.secret_hash, now + timedelta(seconds=overlap_s)
    row.secret_hash, row.prefix = hash_secret(secret), secret[:_PREFIX_CHARS]
    session.flush()
    return NewKey(row=row, secret=secret)


def is_good() -> tuple[ColumnElement[bool], ...]:
    """Conditions that a key is neither revoked nor expired."""
    return ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now())


def good_keys_by_role(session: Session) -> dict[str, int]:
    """How many keys of each role are neither revoked nor expired."""
    counted = select(ApiKey.role, func.count()).where(*is_good()).group_by(ApiKey.role)
    return dict(session.execute(counted).all())


def get_key(session: Session, key_id: str) -> ApiKey:
    """A key by its id; NotFoundError where there is none."""
    return require(session, ApiKey, key_id, param="key_id")


def revoke_key(session: Session, key_id: str) -> tuple[ApiKey, bool]:
    """End a key's life; returns the key, and whether that is new. Revocations of admin keys are one after another.

    Raises:
        NotFoundError: no such key.
        ConflictError: it is the last good admin key.
    """
    good_admins = select(ApiKey.id).where(ApiKey.role == Role.ADMIN, *is_good())
    defer(session, good_admins.order_by(ApiKey.id).with_for_update())
    others = good_admins.where(ApiKey.id != key_id).correlate(None).exists()
    last_admin = and_(ApiKey.role == Role.ADMIN, *is_good(), ~others)
    revoked = update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None), ~last_admin)
    row = session.scalar(
        revoked.values(revoked_at=func.now()).returning(ApiKey),
        execution_options={"synchronize_session": False, "populate_existing": True},
    )
    if row is not None:
        return row, True
    row = get_key(session, key_id)
    if row.revoked_at is None:
        raise ConflictError(f"key '{key_id}' is the last admin key; make another one first", param="key_id")
    return row, False


def record(
    session: Session, *, actor: str, action: str, subject: str, before: Json | None = None, after: Json | None = None
) -> None:
    """Write an audit event, in the transaction of the change."""
    event = insert(AuditEvent).values(actor=actor, action=action, subject=subject, before=before, after=after)
    defer(session, event.inline())


def snapshot(row: Base) -> Json:
    """A row as the audit keeps it: JSON values by column, times in ISO 8601, and never a secret's hash."""
    columns = [column.key for column in inspect(type(row)).columns if not column.key.endswith("secret_hash")]
    values = {column: getattr(row, column) for column in columns}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}


def list_audit(
    session: Session,
    *,
    actor: str | None = None,
    kind: str | None = None,
    subject: str | None = None,
    since: datetime | None = None,
    after: int | None,
    limit: int,
) -> Page[AuditEvent]:
    """One page of audit events, the newest first: by an actor, of a kind (what the action begins with, up to its dot),
    of a subject, from a time on.
    """
    query = select(AuditEvent).where(*matching(AuditEvent, {"actor": actor, "subject": subject}))
    if kind is not None:
        query = query.where(func.split_part(AuditEvent.action, ".", 1) == kind)
    if since is not None:
        query = query.where(AuditEvent.at >= since)
    return page(session, query, after=after, limit=limit, newest_first=True)


def claim_idempotency(session: Session, *, api_key_id: str, key: str, request_hash: str) -> IdempotencyKey | None:
    """None if this request is the first with its key and must be executed, else the row with the stored answer.

    Raises:
        ConflictError: the key was used for another request.
    """
    first = session.scalar(
        insert(IdempotencyKey)
        .values(api_key_id=api_key_id, key=key, request_hash=request_hash)
        .on_conflict_do_nothing()
        .returning(IdempotencyKey.key)
    )
    if first is not None:
        return None
    row = session.get(IdempotencyKey, (api_key_id, key))
    assert row is not None, "nobody deletes idempotency keys of this age"
    if row.request_hash != request_hash:
        raise ConflictError("this Idempotency-Key was used for another request", param="Idempotency-Key")
    return row


def keep_answer(session: Session, *, api_key_id: str, key: str, status: int, body: str) -> None:
    """Remember what was answered."""
    claimed = update(IdempotencyKey).where(IdempotencyKey.api_key_id == api_key_id, IdempotencyKey.key == key)
    defer(session, claimed.values(status=status, body=body))


def has_key_named(session: Session, name: str) -> bool:
    """Whether a key of this name was ever made, in whatever state it is."""
    return session.scalar(select(ApiKey.id).where(ApiKey.name == name).limit(1)) is not None
