"""Pooled instances, host memory of nodes, latency of profiles."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("pooled", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_check_constraint(
        op.f("ck_instances_pooled_takes_no_gpus"), "instances", "gpus >= 0 AND pooled = (gpus = 0)"
    )
    op.create_check_constraint(
        op.f("ck_instances_pooled_is_never_lent"), "instances", "NOT pooled OR (desired <> 'spot' AND NOT donate)"
    )
    op.add_column("nodes", sa.Column("host_bytes", sa.BigInteger(), nullable=True))
    op.create_check_constraint(op.f("ck_nodes_host_bytes_positive"), "nodes", "host_bytes > 0")
    op.add_column("profiles", sa.Column("latency", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("profiles", "latency")
    op.drop_constraint(op.f("ck_nodes_host_bytes_positive"), "nodes", type_="check")
    op.drop_column("nodes", "host_bytes")
    op.execute("UPDATE nodes SET generation = generation + 1 WHERE name IN (SELECT node FROM instances WHERE pooled)")
    op.execute("DELETE FROM instances WHERE pooled")
    op.drop_constraint(op.f("ck_instances_pooled_is_never_lent"), "instances", type_="check")
    op.drop_constraint(op.f("ck_instances_pooled_takes_no_gpus"), "instances", type_="check")
    op.drop_column("instances", "pooled")
