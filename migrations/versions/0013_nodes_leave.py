"""Draining nodes: agents that shut down, and the instances that replace those of such a node."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("leaving", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("instances", sa.Column("succeeds", sa.String(), nullable=True))
    op.create_foreign_key(
        op.f("fk_instances_succeeds_instances"), "instances", "instances", ["succeeds"], ["id"], ondelete="SET NULL"
    )
    op.create_index(
        "ix_instances_succeeds", "instances", ["succeeds"], postgresql_where=sa.text("succeeds IS NOT NULL")
    )


def downgrade() -> None:
    op.drop_index("ix_instances_succeeds", table_name="instances")
    op.drop_constraint(op.f("fk_instances_succeeds_instances"), "instances", type_="foreignkey")
    op.drop_column("instances", "succeeds")
    op.drop_column("nodes", "leaving")
