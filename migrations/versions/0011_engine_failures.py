"""Failures of models by engine, and the previous engine of an instance."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("came_from", sa.String(), nullable=True))
    op.create_check_constraint(op.f("ck_instances_came_from_known"), "instances", "came_from IN ('torch', 'vllm')")
    op.create_table(
        "engine_failures",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("engine", sa.String(), nullable=False),
        sa.Column("times", sa.BigInteger(), nullable=False),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("error", sa.String(), nullable=False),
        sa.CheckConstraint("engine IN ('torch', 'vllm')", name=op.f("ck_engine_failures_engine_known")),
        sa.CheckConstraint("times > 0", name=op.f("ck_engine_failures_positive")),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_engine_failures_model"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["gpu_type"], ["gpu_types.name"], name=op.f("fk_engine_failures_gpu_type")),
        sa.PrimaryKeyConstraint("model", "gpu_type", "engine", name=op.f("pk_engine_failures")),
    )


def downgrade() -> None:
    op.drop_table("engine_failures")
    op.drop_constraint(op.f("ck_instances_came_from_known"), "instances", type_="check")
    op.drop_column("instances", "came_from")
