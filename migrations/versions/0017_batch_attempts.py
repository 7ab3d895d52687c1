"""Attempts to validate or finalize a batch, with a time before which none follows."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("batches", sa.Column("not_before", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "not_before")
    op.drop_column("batches", "attempts")
