"""The tables of the Files and Batch APIs and of the NIW queue.

The promise "an accepted batch request has exactly one result" is the primary key of `batch_results`, together with the
rule that a result is written in the transaction that ends its request. Bodies are `json`, not `jsonb`: they are kept as
they came, and text that people and models write may hold U+0000, which `jsonb` refuses.
"""

from datetime import datetime

from sqlalchemy import JSON, CheckConstraint, ForeignKey, Identity, Index, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.policies.lifecycle import BatchRequestState, BatchState
from controlplane.store.tables import Base, Json, one_of


class File(Base):
    """An uploaded or produced file. Its bytes are on disk under its id."""

    __tablename__ = "files"
    __table_args__ = (
        CheckConstraint("purpose IN ('batch', 'batch_output')", name="purpose_known"),
        Index("ix_files_tenant", "tenant", "created_at", "id"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


class Batch(Base):
    """An offline job. Its counts are counted from its requests, never kept."""

    __tablename__ = "batches"
    __table_args__ = (one_of("state", BatchState), Index("ix_batches_tenant", "tenant", "created_at", "id"))
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    endpoint: Mapped[str]
    completion_window: Mapped[str]
    state: Mapped[str]
    input_file_id: Mapped[str] = mapped_column(ForeignKey("files.id"))
    output_file_id: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    error_file_id: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    labels: Mapped[Json | None]
    errors: Mapped[Json | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deadline_at: Mapped[datetime]
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]


class BatchRequest(Base):
    """One line of a batch: a deferred request (NIW). Running means leased until `lease_until` to `lease_id`."""

    __tablename__ = "batch_requests"
    __table_args__ = (
        one_of("state", BatchRequestState),
        UniqueConstraint("batch_id", "line"),
        UniqueConstraint("batch_id", "custom_id"),
        CheckConstraint("(state = 'running') = (lease_id IS NOT NULL)", name="lease_while_running"),
        Index("ix_batch_requests_claim", "model", "deadline_at", "id", postgresql_where=text("state = 'waiting'")),
        Index("ix_batch_requests_leased", "lease_until", postgresql_where=text("state = 'running'")),
        Index("ix_batch_requests_open", "batch_id", postgresql_where=text("state IN ('waiting', 'running')")),
    )
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"))
    line: Mapped[int]
    custom_id: Mapped[str]
    model: Mapped[str]
    body: Mapped[Json] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(server_default=text("'waiting'"))
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    lease_id: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deadline_at: Mapped[datetime]


class BatchResult(Base):
    """The one result of a request. `error` is set where no answer was made (expired, cancelled)."""

    __tablename__ = "batch_results"
    request_id: Mapped[int] = mapped_column(
        ForeignKey("batch_requests.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    status_code: Mapped[int | None]
    body: Mapped[Json | None] = mapped_column(JSON)
    error: Mapped[Json | None]
    upstream_id: Mapped[str]
    finished_at: Mapped[datetime] = mapped_column(server_default=func.now())
