"""The request log."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "request_log",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=True),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("tier", sa.String(), nullable=True),
        sa.Column("region", sa.String(), nullable=True),
        sa.Column("nodes", sa.ARRAY(sa.String()), nullable=False),
        sa.Column("continuations", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("placed_s", sa.Float(), nullable=True),
        sa.Column("first_token_s", sa.Float(), nullable=True),
        sa.Column("duration_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_request_log")),
    )
    op.create_index(op.f("ix_request_log_request_id"), "request_log", ["request_id"])
    op.create_index(op.f("ix_request_log_ended_at"), "request_log", ["ended_at"])


def downgrade() -> None:
    op.drop_table("request_log")
