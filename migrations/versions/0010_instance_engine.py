"""The engine of each instance and the reason; measured rates of both engines by GPU type."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("engine", sa.String(), server_default=sa.text("'auto'"), nullable=False))
    op.add_column("instances", sa.Column("engine_reason", sa.String(), nullable=True))
    op.execute("UPDATE instances SET engine = models.engine FROM models WHERE name = model AND NOT pooled")
    op.create_check_constraint(op.f("ck_instances_engine_known"), "instances", "engine IN ('auto', 'torch', 'vllm')")
    op.add_column("profiles", sa.Column("engine_rates", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("profiles", "engine_rates")
    op.drop_constraint(op.f("ck_instances_engine_known"), "instances", type_="check")
    op.drop_column("instances", "engine_reason")
    op.drop_column("instances", "engine")
