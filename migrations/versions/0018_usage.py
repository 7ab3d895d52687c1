"""Usage by hour, tenant, model and tier."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_hours",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("writer", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "requests >= failed AND failed >= 0 AND input_tokens >= 0 AND output_tokens >= 0",
            name=op.f("ck_usage_hours_positive"),
        ),
        sa.PrimaryKeyConstraint("hour", "tenant", "model", "tier", "writer", name=op.f("pk_usage_hours")),
    )
    op.create_index("ix_usage_hours_tenant", "usage_hours", ["tenant", "hour"])


def downgrade() -> None:
    op.drop_table("usage_hours")
