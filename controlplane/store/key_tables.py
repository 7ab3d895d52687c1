"""The tables of keys, tenants and the audit."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Identity, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.store.tables import Base, Json, Role, one_of


class Tenant(Base):
    """What a tenant may use; null: without limit. A tenant without a row has the limits of the settings."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("requests_per_minute > 0 AND tokens_per_minute > 0 AND concurrent_max > 0", name="positive"),
        CheckConstraint("queued_batch_tokens_max >= 0", name="queued_positive"),
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrent_max: Mapped[int | None]
    queued_batch_tokens_max: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


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
    """The answer already given to a POST with this key, so that a retry changes nothing."""

    __tablename__ = "idempotency_keys"
    api_key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    status: Mapped[int | None]
    body: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
