"""Stored responses of the Responses API."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

STATES = "'in_progress', 'completed', 'incomplete', 'failed', 'cancelled'"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("previous_id", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("input", sa.LargeBinary(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("heard_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_responses")),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_responses_state_known")),
    )
    op.create_index(op.f("ix_responses_created_at"), "responses", ["created_at"])


def downgrade() -> None:
    op.drop_table("responses")
