"""What a starting instance waits for, reported by its node."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("waits_for", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("instances", "waits_for")
