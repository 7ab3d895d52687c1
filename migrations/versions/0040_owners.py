"""What a fleet's file made carries the name of its owner, so that pruning deletes nothing else."""

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0044"
branch_labels = None
depends_on = None

TABLES = ("regions", "region_latencies", "gpu_types", "models", "profiles", "endpoints", "pins", "tenants")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("owner", sa.String(), nullable=True))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "owner")
