"""Settled instances of endpoints, and those that could not be placed."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoints", sa.Column("settled", postgresql.JSONB(), nullable=True))
    op.add_column("endpoints", sa.Column("unplaced", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("endpoints", "unplaced")
    op.drop_column("endpoints", "settled")
