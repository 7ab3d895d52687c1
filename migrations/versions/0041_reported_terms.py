"""The newest term that nodes have seen, and events of terms."""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("terms", sa.Column("reported", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    _allow_kinds("'instance', 'node', 'plan', 'term'")


def downgrade() -> None:
    op.execute("DELETE FROM events WHERE kind = 'term'")
    _allow_kinds("'instance', 'node', 'plan'")
    op.drop_column("terms", "reported")


def _allow_kinds(kinds: str) -> None:
    op.drop_constraint(op.f("ck_events_kind_known"), "events", type_="check")
    op.create_check_constraint(op.f("ck_events_kind_known"), "events", f"kind IN ({kinds})")
