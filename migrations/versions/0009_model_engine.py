"""The engine of a model's dedicated instances."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("engine", sa.String(), server_default=sa.text("'auto'"), nullable=False))
    op.create_check_constraint(op.f("ck_models_engine"), "models", "engine IN ('auto', 'torch', 'vllm')")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_models_engine"), "models", type_="check")
    op.drop_column("models", "engine")
