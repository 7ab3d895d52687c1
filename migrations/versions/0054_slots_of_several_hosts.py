"""Slots say of how many hosts their GPUs are; null: an agent of an older release has not said."""

import sqlalchemy as sa
from alembic import op

revision = "0054"
down_revision = "0053"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("slots", sa.Column("hosts", sa.BigInteger()))
    op.create_check_constraint(op.f("ck_slots_hosts_positive"), "slots", "hosts > 0")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_slots_hosts_positive"), "slots", type_="check")
    op.drop_column("slots", "hosts")
