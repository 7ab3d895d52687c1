"""The tables of the Files and Batch APIs and of the NIW queue.

A request is a line of a batch; its key is (`batch_number`, `line`) in every table. It is *open* while it has a row in
`queued_requests`, and ended when it has one in `batch_results`; the only statements that write a result delete the
queue's row and use the key that they deleted. So two primary keys and one statement guarantee that an accepted request
has exactly one result, and the queue holds only open requests. When the output files of a batch are written, its
requests and results are deleted: the files are the archive.

These three tables have no foreign keys: each would lock a row of another table for every row written. Bodies are
`json`, not `jsonb`: text that people and models write may hold U+0000, which `jsonb` refuses.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, CheckConstraint, ForeignKey, Identity, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.policies.lifecycle import BATCH_REQUEST, BatchState, terminal_states
from controlplane.store.tables import Base, Json, one_of

_ENDED = ", ".join(f"'{state.value}'" for state in sorted(terminal_states(BATCH_REQUEST)))


class File(Base):
    """An uploaded or produced file. Its bytes are a blob of its id."""

    __tablename__ = "files"
    __table_args__ = (
        CheckConstraint("purpose IN ('batch', 'batch_output')", name="purpose_known"),
        Index("ix_files_tenant", "tenant", "id"),
        Index("ix_files_expiring", "expires_at", postgresql_where=text("deleted_at IS NULL")),
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
    """An offline job. `total` is set by its validation; `completed`, `failed` and the tokens are its final counts,
    written with its output. `models`: those that its creator's key may use; null is all. `attempts`: attempts to
    advance it from its state; the next one is allowed at `not_before`. While it is in progress, `predicted_end_at`,
    `at_risk` and `end_reason` say when it will end, as far as is known, whether that is too late, and why.
    """

    __tablename__ = "batches"
    __table_args__ = (
        one_of("state", BatchState),
        Index("ix_batches_tenant", "tenant", "id"),
        Index("ix_batches_open", "state", "id", postgresql_where=text("ended_at IS NULL")),
        UniqueConstraint("number"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(Identity())
    tenant: Mapped[str]
    endpoint: Mapped[str]
    completion_window: Mapped[str]
    state: Mapped[str]
    input_file_id: Mapped[str] = mapped_column(ForeignKey("files.id"))
    output_file_id: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    error_file_id: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    output_keep_s: Mapped[int | None]
    labels: Mapped[Json | None]
    models: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    errors: Mapped[Json | None]
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    not_before: Mapped[datetime | None]
    total: Mapped[int] = mapped_column(server_default=text("0"))
    completed: Mapped[int] = mapped_column(server_default=text("0"))
    failed: Mapped[int] = mapped_column(server_default=text("0"))
    input_tokens: Mapped[int] = mapped_column(server_default=text("0"))
    output_tokens: Mapped[int] = mapped_column(server_default=text("0"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deadline_at: Mapped[datetime]
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    predicted_end_at: Mapped[datetime | None]
    at_risk: Mapped[bool] = mapped_column(server_default=text("false"))
    end_reason: Mapped[str | None]


class BatchSpeed(Base):
    """How fast batch requests of a model complete, from one look to the next (`policies.batch_ends.SpeedSample`).
    `ended`: completed requests of batches whose rows are deleted; those of the others are in `batch_counts`.
    """

    __tablename__ = "batch_speeds"
    model: Mapped[str] = mapped_column(primary_key=True)
    ended: Mapped[int] = mapped_column(server_default=text("0"))
    finished: Mapped[int] = mapped_column(server_default=text("0"))
    at: Mapped[datetime | None]
    busy: Mapped[bool] = mapped_column(server_default=text("false"))
    per_s: Mapped[float | None]
    measured_at: Mapped[datetime | None]


class BatchModel(Base):
    """A model that lines of a batch ask for, with their number and an estimate of their input tokens."""

    __tablename__ = "batch_models"
    batch_number: Mapped[int] = mapped_column(
        ForeignKey("batches.number", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    tokens: Mapped[int]


class BatchRequest(Base):
    """One line of a batch that has not ended. `body`: the validated request as nodes take it (`Generate`); an older
    version stored the client's body. A row never changes.
    """

    __tablename__ = "batch_requests"
    batch_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    custom_id: Mapped[str]
    body: Mapped[Json] = mapped_column(JSON)


class BatchCount(Base):
    """Counts of a batch's ended requests of one model and their tokens, in parts to be summed. Every statement that
    writes results adds to its connection's part, so that dispatchers seldom wait for each other, and results are never
    counted.
    """

    __tablename__ = "batch_counts"
    batch_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    model: Mapped[str] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    completed: Mapped[int]
    failed: Mapped[int]
    input_tokens: Mapped[int]
    output_tokens: Mapped[int]


class QueuedRequest(Base):
    """A deferred request (NIW) without a result. It is leased until `lease_until`, or waits. `epoch` is its fencing
    token: it rises with each claim, and when a claim ends without a result. Writes for a request and commands to nodes
    name the epoch of their claim; writes of an older epoch are refused, and nodes refuse epochs older than the newest
    that they have seen. `attempts`: claims in which a node may have had it. `tokens`: an estimate of its prompt and
    completion; its tenant's limit counts them while the row exists.
    """

    __tablename__ = "queued_requests"
    __table_args__ = (
        Index(
            "ix_queued_requests_waiting",
            "batch_number",
            "model",
            "line",
            postgresql_where=text("lease_until IS NULL"),
        ),
        Index("ix_queued_requests_leased", "lease_until", postgresql_where=text("lease_until IS NOT NULL")),
    )
    batch_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    model: Mapped[str]
    tokens: Mapped[int] = mapped_column(server_default=text("0"))
    epoch: Mapped[int] = mapped_column(server_default=text("0"))
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    lease_until: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    last_error: Mapped[str | None]


class BatchResult(Base):
    """The one result of a request. `error`: why there is no answer (expired, cancelled, no attempts left)."""

    __tablename__ = "batch_results"
    __table_args__ = (CheckConstraint(f"state IN ({_ENDED})", name="state_known"),)
    batch_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str]
    status_code: Mapped[int | None]
    body: Mapped[Json | None] = mapped_column(JSON)
    error: Mapped[Json | None]
    upstream_id: Mapped[str]
    input_tokens: Mapped[int] = mapped_column(server_default=text("0"))
    output_tokens: Mapped[int] = mapped_column(server_default=text("0"))
    finished_at: Mapped[datetime] = mapped_column(server_default=func.now())
