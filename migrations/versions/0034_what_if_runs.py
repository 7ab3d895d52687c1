"""What-if runs: simulations of the running fleet that operators asked for."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "what_if_runs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("hours", sa.BigInteger(), nullable=False),
        sa.Column("changes", JSONB(), nullable=False),
        sa.Column("state", sa.String(), server_default=sa.text("'queued'"), nullable=False),
        sa.Column("progress", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("result", JSONB(none_as_null=True), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("event_log_hash", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heard_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_what_if_runs_state_known"),
        ),
        sa.CheckConstraint("progress BETWEEN 0 AND 1", name=op.f("ck_what_if_runs_progress_is_a_share")),
        sa.CheckConstraint(
            "state <> 'completed' OR result IS NOT NULL", name=op.f("ck_what_if_runs_completed_with_a_result")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_what_if_runs")),
    )
    op.create_index(op.f("ix_what_if_runs_created_at"), "what_if_runs", ["created_at"])
    op.create_index(
        "ix_what_if_runs_open",
        "what_if_runs",
        ["state", "id"],
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )


def downgrade() -> None:
    op.drop_table("what_if_runs")
