"""The tables of the Files and Batch APIs and of the NIW queue.

A request is a line of a batch: (`batch_number`, `line`) names it everywhere. It is *open* while it has a row in
`queued_requests`, and ended when it has one in `batch_results`; the only statements that write a result delete the
queue's row and take the key from what they deleted. So the promise "an accepted request has exactly one result" is two
primary keys and one statement, and the queue holds what is open and nothing else, however much has ended. When the
output files of a batch are written, its requests and results are deleted: the files are the archive.

There are no foreign keys between these three: each would lock a row of another table for every row written. Bodies are
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
    """An offline job. `total` is known when it was validated; `completed`, `failed` and the tokens are its last counts,
    written with its output. `models`: those that its creator's key may use; null is all. `attempts` counts the tries to
    move it on from its state; the next is not before `not_before`.
    """

    __tablename__ = "batches"
    __table_args__ = (
        one_of("state", BatchState),
        Index("ix_batches_tenant", "tenant", "created_at", "id"),
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


class BatchModel(Base):
    """A model that lines of a batch ask for: what the queue is looked through by. `tokens`: their input, guessed."""

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
    """How a batch's requests ended so far, and the tokens of them, in parts to be added up. Every statement that writes
    results adds to its connection's part, so dispatchers seldom wait for each other, and nothing counts results.
    """

    __tablename__ = "batch_counts"
    batch_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    completed: Mapped[int]
    failed: Mapped[int]
    input_tokens: Mapped[int]
    output_tokens: Mapped[int]


class QueuedRequest(Base):
    """A deferred request (NIW) without a result. It is leased until `lease_until`, or waits. `epoch` rises with each
    claim, and when one is over without a result; it is the fence: who writes for a request names the epoch of its
    claim, and any other is refused; who commands a node does too, and is refused if the node has seen a newer one.
    `attempts` counts those claims in which a node may have had it. `tokens`: prompt and completion that it may take,
    guessed; its tenant's limit counts them for as long as the row is here.
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
    """The one result of a request. `error` is set where no answer was made (expired, cancelled, given up)."""

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
