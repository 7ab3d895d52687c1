"""Times to first tokens and between tokens, measured and predicted."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0053"
down_revision = "0052"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "latency_comparisons",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("ttft_s", sa.Float(), nullable=False),
        sa.Column("predicted_ttft_s", sa.Float(), nullable=True),
        sa.Column("tbt_s", sa.Float(), nullable=True),
        sa.Column("predicted_tbt_s", sa.Float(), nullable=True),
        sa.Column("batch", sa.Float(), nullable=True),
        sa.Column("prefill_share", sa.Float(), nullable=True),
        sa.Column("prompt_tokens", sa.Float(), nullable=False),
        sa.Column("context_tokens", sa.Float(), nullable=False),
        sa.Column("tiers", postgresql.JSONB(), nullable=False),
        sa.Column("differs", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("compared_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("requests > 0", name=op.f("ck_latency_comparisons_measured")),
        sa.PrimaryKeyConstraint("model", "region", "gpu_type", name=op.f("pk_latency_comparisons")),
    )


def downgrade() -> None:
    op.drop_table("latency_comparisons")
