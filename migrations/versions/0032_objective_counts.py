"""How objectives were kept, by ten minutes, model, region and tier."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "objective_counts",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("start_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("answers", sa.BigInteger(), nullable=False),
        sa.Column("kept", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("tokens_in_time", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("mod(start_s, 600) = 0", name=op.f("ck_objective_counts_bucket")),
        sa.CheckConstraint("answers >= kept AND kept >= 0", name=op.f("ck_objective_counts_answers_positive")),
        sa.CheckConstraint(
            "tokens >= tokens_in_time AND tokens_in_time >= 0", name=op.f("ck_objective_counts_tokens_positive")
        ),
        sa.PrimaryKeyConstraint("model", "start_s", "region", "tier", name=op.f("pk_objective_counts")),
    )
    op.create_index("ix_objective_counts_start_s", "objective_counts", ["start_s"])


def downgrade() -> None:
    op.drop_table("objective_counts")
