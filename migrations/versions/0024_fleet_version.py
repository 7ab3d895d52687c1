"""The fleet counts its changes, scaling's too: a decision made without its lock is applied to what it was made for."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("fleet", sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    op.drop_column("fleet", "version")
