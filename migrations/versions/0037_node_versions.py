"""Nodes keep the versions of their agent and of its engine."""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("version", sa.String(), nullable=True))
    op.add_column("nodes", sa.Column("engine_version", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("nodes", "engine_version")
    op.drop_column("nodes", "version")
