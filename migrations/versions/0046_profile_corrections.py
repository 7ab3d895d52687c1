"""What instances did by windows of five minutes, and corrections of profiles."""

import sqlalchemy as sa
from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None

_AT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "load_windows",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("start_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("observed_s", sa.BigInteger(), nullable=False),
        sa.Column("instances", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_s", sa.Float(), nullable=False),
        sa.Column("utilization", sa.Float(), nullable=False),
        sa.Column("late", sa.Float(), nullable=False),
        sa.CheckConstraint("mod(start_s, 300) = 0", name=op.f("ck_load_windows_window")),
        sa.CheckConstraint("instances > 0", name=op.f("ck_load_windows_observed")),
        sa.PrimaryKeyConstraint("model", "gpu_type", "region", "start_s", name=op.f("pk_load_windows")),
    )
    op.create_index("ix_load_windows_start_s", "load_windows", ["start_s"])
    op.create_table(
        "profile_corrections",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("stated_tokens_per_s", sa.Float(), nullable=False),
        sa.Column("factor", sa.Float(), nullable=False),
        sa.Column("estimate", sa.Float(), nullable=True),
        sa.Column("windows", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("moved_at", _AT, nullable=True),
        sa.Column("prefill_factor", sa.Float(), nullable=False),
        sa.Column("decode_factor", sa.Float(), nullable=False),
        sa.Column("steps_reason", sa.String(), nullable=False),
        sa.Column("steps_moved_at", _AT, nullable=True),
        sa.Column("corrected_at", _AT, server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "stated_tokens_per_s > 0 AND factor > 0 AND prefill_factor > 0 AND decode_factor > 0",
            name=op.f("ck_profile_corrections_positive"),
        ),
        sa.ForeignKeyConstraint(
            ["model", "gpu_type"],
            ["profiles.model", "profiles.gpu_type"],
            name=op.f("fk_profile_corrections_model_profiles"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("model", "gpu_type", name=op.f("pk_profile_corrections")),
    )


def downgrade() -> None:
    op.drop_table("profile_corrections")
    op.drop_table("load_windows")
