"""Tables of the batch queue: requests, open requests, and results. Finished batches keep only their counts."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ENDED = "'completed', 'failed', 'expired', 'cancelled'"
_COUNTS = ("total", "completed", "failed", "input_tokens", "output_tokens")


def upgrade() -> None:
    op.rename_table("batch_requests", "old_requests")
    op.rename_table("batch_results", "old_results")
    for kind, name in (("pk", "batch_requests"), ("pk", "batch_results")):
        op.execute(f"ALTER TABLE old_{name.removeprefix('batch_')} DROP CONSTRAINT {kind}_{name} CASCADE")
    op.add_column("batches", sa.Column("number", sa.BigInteger(), sa.Identity(always=False), nullable=False))
    op.create_unique_constraint(op.f("uq_batches_number"), "batches", ["number"])
    for name in _COUNTS:
        op.add_column("batches", sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("batches", sa.Column("output_keep_s", sa.BigInteger(), nullable=True))
    op.create_index("ix_batches_open", "batches", ["state", "id"], postgresql_where=sa.text("ended_at IS NULL"))
    _create_tables()
    _move_rows_up()
    op.drop_table("old_results")
    op.drop_table("old_requests")


def _create_tables() -> None:
    op.create_table(
        "batch_models",
        sa.Column("batch_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_number"], ["batches.number"], name=op.f("fk_batch_models_batch_number"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_number", "model", name=op.f("pk_batch_models")),
    )
    op.create_table(
        "batch_requests",
        sa.Column("batch_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.String(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("batch_number", "line", name=op.f("pk_batch_requests")),
    )
    op.create_table(
        "queued_requests",
        sa.Column("batch_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("batch_number", "line", name=op.f("pk_queued_requests")),
    )
    op.create_index(
        "ix_queued_requests_waiting",
        "queued_requests",
        ["batch_number", "model", "line"],
        postgresql_where=sa.text("lease_until IS NULL"),
    )
    op.create_index(
        "ix_queued_requests_leased",
        "queued_requests",
        ["lease_until"],
        postgresql_where=sa.text("lease_until IS NOT NULL"),
    )
    # Rows come and go by the thousand a second: vacuum by their number, not by a share of the table, and at full speed.
    op.execute(
        "ALTER TABLE queued_requests SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 10000,"
        " autovacuum_vacuum_cost_delay = 0)"
    )
    op.create_table(
        "batch_results",
        sa.Column("batch_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("status_code", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.JSON(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("upstream_id", sa.String(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(f"state IN ({_ENDED})", name=op.f("ck_batch_results_state_known")),
        sa.PrimaryKeyConstraint("batch_number", "line", name=op.f("pk_batch_results")),
    )


def _move_rows_up() -> None:
    op.execute(
        "UPDATE batches SET total = old.total FROM"
        " (SELECT batch_id, count(*) AS total FROM old_requests GROUP BY batch_id) AS old"
        " WHERE old.batch_id = batches.id"
    )
    op.execute(  # unfinished batches are counted when they end
        "UPDATE batches SET completed = old.completed, failed = batches.total - old.completed FROM"
        " (SELECT batch_id, count(*) FILTER (WHERE state = 'completed') AS completed FROM old_requests"
        " GROUP BY batch_id) AS old WHERE old.batch_id = batches.id AND batches.ended_at IS NOT NULL"
    )
    unfinished = "FROM old_requests AS old JOIN batches ON batches.id = old.batch_id AND batches.ended_at IS NULL"
    op.execute(
        "INSERT INTO batch_models (batch_number, model, requests, tokens)"
        f" SELECT number, model, count(*), sum(octet_length(body::text)) / 4 {unfinished} GROUP BY number, model"
    )
    op.execute(
        "INSERT INTO batch_requests (batch_number, line, custom_id, body)"
        f" SELECT number, line, custom_id, body {unfinished}"
    )
    op.execute(
        "INSERT INTO queued_requests"
        " (batch_number, line, model, tokens, epoch, attempts, lease_until, not_before, last_error)"
        " SELECT number, line, model, octet_length(body::text) / 4, old.attempts, old.attempts, lease_until, not_before, last_error"
        f" {unfinished} WHERE old.state IN ('waiting', 'running')"
    )
    op.execute(
        "INSERT INTO batch_results (batch_number, line, state, status_code, body, error, upstream_id, finished_at)"
        " SELECT number, line, old.state, status_code, result.body, error, upstream_id, finished_at"
        f" {unfinished} JOIN old_results AS result ON result.request_id = old.id WHERE old.state IN ({_ENDED})"
    )


def downgrade() -> None:
    for name in ("requests", "results"):
        op.rename_table(f"batch_{name}", f"new_{name}")
        op.execute(f"ALTER TABLE new_{name} DROP CONSTRAINT pk_batch_{name}")
    _create_old_tables()
    op.execute(
        "INSERT INTO batch_requests (batch_id, line, custom_id, model, body, state, attempts, lease_id, lease_until,"
        " not_before, last_error, deadline_at)"
        " SELECT batches.id, asked.line, custom_id, coalesce(queued.model, asked.body ->> 'model'), asked.body,"
        " coalesce(result.state, CASE WHEN lease_until IS NULL THEN 'waiting' ELSE 'running' END),"
        " coalesce(attempts, 1),"
        " CASE WHEN result.state IS NULL AND lease_until IS NOT NULL THEN queued.epoch::text END,"
        " CASE WHEN result.state IS NULL THEN lease_until END, not_before, last_error, deadline_at"
        " FROM new_requests AS asked JOIN batches ON batches.number = asked.batch_number"
        " LEFT JOIN queued_requests AS queued USING (batch_number, line)"
        " LEFT JOIN new_results AS result USING (batch_number, line)"
    )
    op.execute(
        "INSERT INTO batch_results (request_id, status_code, body, error, upstream_id, finished_at)"
        " SELECT asked.id, result.status_code, result.body, result.error, result.upstream_id, result.finished_at"
        " FROM new_results AS result JOIN batches ON batches.number = result.batch_number"
        " JOIN batch_requests AS asked ON asked.batch_id = batches.id AND asked.line = result.line"
    )
    op.drop_table("new_results")
    op.drop_table("queued_requests")
    op.drop_table("new_requests")
    op.drop_table("batch_models")
    op.drop_index("ix_batches_open", table_name="batches", postgresql_where=sa.text("ended_at IS NULL"))
    op.drop_constraint(op.f("uq_batches_number"), "batches", type_="unique")
    for name in ("output_keep_s", *reversed(_COUNTS), "number"):
        op.drop_column("batches", name)


def _create_old_tables() -> None:
    op.create_table(
        "batch_requests",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("line", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), server_default=sa.text("'waiting'"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_id", sa.String(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "(state = 'running') = (lease_id IS NOT NULL)", name=op.f("ck_batch_requests_lease_while_running")
        ),
        sa.CheckConstraint(f"state IN ('waiting', 'running', {_ENDED})", name=op.f("ck_batch_requests_state_known")),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_requests_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch_requests")),
        sa.UniqueConstraint("batch_id", "custom_id", name=op.f("uq_batch_requests_batch_id_custom_id")),
        sa.UniqueConstraint("batch_id", "line", name=op.f("uq_batch_requests_batch_id_line")),
    )
    for name, columns, where in (
        ("claim", ["model", "deadline_at", "id"], "state = 'waiting'"),
        ("leased", ["lease_until"], "state = 'running'"),
        ("open", ["batch_id"], "state IN ('waiting', 'running')"),
    ):
        op.create_index(f"ix_batch_requests_{name}", "batch_requests", columns, postgresql_where=sa.text(where))
    op.create_table(
        "batch_results",
        sa.Column("request_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("status_code", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.JSON(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("upstream_id", sa.String(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["batch_requests.id"], name=op.f("fk_batch_results_request_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_batch_results")),
    )
