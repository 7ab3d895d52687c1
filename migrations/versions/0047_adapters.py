"""LoRA adapters: models that are added to the weights of another one."""

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("base", sa.String(), nullable=True))
    op.create_foreign_key(op.f("fk_models_base"), "models", "models", ["base"], ["name"])


def downgrade() -> None:
    op.drop_constraint(op.f("fk_models_base"), "models")
    op.drop_column("models", "base")
