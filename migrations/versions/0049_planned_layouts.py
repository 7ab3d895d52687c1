"""Layouts that plans write, unless an operator holds the one of a node."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("layout_held", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("nodes", sa.Column("layout_chosen_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("plans", sa.Column("layouts", JSONB(), server_default=sa.text("'[]'"), nullable=False))


def downgrade() -> None:
    op.drop_column("plans", "layouts")
    op.drop_column("nodes", "layout_chosen_at")
    op.drop_column("nodes", "layout_held")
