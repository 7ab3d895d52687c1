"""Shares of tenants' limits by region."""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limit_shares",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("granted", sa.BigInteger(), nullable=False),
        sa.Column("floor", sa.BigInteger(), nullable=False),
        sa.Column("held", sa.BigInteger(), nullable=False),
        sa.Column("held_floor", sa.BigInteger(), nullable=False),
        sa.Column("demand", sa.Float(), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "0 <= floor AND floor <= granted AND granted <= held AND floor <= held_floor",
            name=op.f("ck_limit_shares_held"),
        ),
        sa.PrimaryKeyConstraint("tenant", "kind", "region", name=op.f("pk_limit_shares")),
    )


def downgrade() -> None:
    op.drop_table("limit_shares")
