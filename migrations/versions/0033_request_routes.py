"""The request log tells which gateway a request had, its trace, and why it was routed where it was."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

_TEXTS = ("gateway", "trace_id", "origin", "instance_id")


def upgrade() -> None:
    for name in _TEXTS:
        op.add_column("request_log", sa.Column(name, sa.String()))
    op.add_column("request_log", sa.Column("utilization", sa.Float()))
    op.add_column("request_log", sa.Column("cached_tokens", sa.BigInteger()))


def downgrade() -> None:
    for name in (*_TEXTS, "utilization", "cached_tokens"):
        op.drop_column("request_log", name)
