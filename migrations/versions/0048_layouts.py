"""How the GPUs of nodes are to be grouped into slots."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0048"
down_revision = "0047"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("regroups", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("nodes", sa.Column("layout", JSONB(none_as_null=True), nullable=True))
    op.add_column("nodes", sa.Column("layout_at", sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint(op.f("ck_nodes_layout_since"), "nodes", "(layout IS NULL) = (layout_at IS NULL)")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_nodes_layout_since"), "nodes")
    op.drop_column("nodes", "layout_at")
    op.drop_column("nodes", "layout")
    op.drop_column("nodes", "regroups")
