"""LoRA adapters that the instances of their bases serve."""

import sqlalchemy as sa
from alembic import op

revision = "0050"
down_revision = "0049"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("with_base", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_check_constraint(op.f("ck_models_with_base_of_one"), "models", "NOT with_base OR base IS NOT NULL")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_models_with_base_of_one"), "models")
    op.drop_column("models", "with_base")
