"""Slots of several workers, which serve their models together."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("slots", sa.Column("workers", sa.BigInteger(), server_default=sa.text("1"), nullable=False))
    op.create_check_constraint(op.f("ck_slots_workers_share_gpus"), "slots", "workers > 0 AND gpus % workers = 0")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_slots_workers_share_gpus"), "slots", type_="check")
    op.drop_column("slots", "workers")
