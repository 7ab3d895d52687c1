"""Spot instances and their leases; kinds of instances."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_DESIRED = "'running', 'draining', 'stopped'"
_OBSERVED = "'pending', 'loading', 'ready', 'draining', 'stopped', 'failed'"


def _known(column: str, values: str) -> None:
    op.drop_constraint(op.f(f"ck_instances_{column}_known"), "instances", type_="check")
    op.create_check_constraint(op.f(f"ck_instances_{column}_known"), "instances", f"{column} IN ({values})")


def upgrade() -> None:
    _known("desired", "'running', 'draining', 'spot', 'stopped'")
    _known("observed", "'pending', 'loading', 'ready', 'draining', 'spot', 'stopped', 'failed'")
    op.add_column("instances", sa.Column("kind", sa.String(), server_default=sa.text("'mixed'"), nullable=False))
    op.add_column("instances", sa.Column("donate", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("instances", sa.Column("spot_at", sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint(op.f("ck_instances_kind_known"), "instances", "kind IN ('mixed', 'IW', 'NIW')")
    op.create_check_constraint(
        op.f("ck_instances_spot_since"), "instances", "(desired = 'spot') = (spot_at IS NOT NULL)"
    )
    op.create_check_constraint(
        op.f("ck_instances_donate_while_draining"), "instances", "NOT donate OR desired = 'draining'"
    )
    op.create_table(
        "spot_leases",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reclaim_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.CheckConstraint(
            "end_reason IN ('returned', 'expired', 'reclaimed', 'lost')", name=op.f("ck_spot_leases_end_reason_known")
        ),
        sa.CheckConstraint("expires_at >= created_at", name=op.f("ck_spot_leases_expires_later")),
        sa.CheckConstraint("(ended_at IS NULL) = (end_reason IS NULL)", name=op.f("ck_spot_leases_ended_for_a_reason")),
        sa.ForeignKeyConstraint(
            ["instance_id"], ["instances.id"], name=op.f("fk_spot_leases_instance_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_spot_leases")),
    )
    op.create_index(
        "uq_spot_leases_active",
        "spot_leases",
        ["instance_id"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def downgrade() -> None:
    op.drop_index("uq_spot_leases_active", table_name="spot_leases", postgresql_where=sa.text("ended_at IS NULL"))
    op.drop_table("spot_leases")
    op.drop_constraint(op.f("ck_instances_donate_while_draining"), "instances", type_="check")
    op.drop_constraint(op.f("ck_instances_spot_since"), "instances", type_="check")
    op.drop_constraint(op.f("ck_instances_kind_known"), "instances", type_="check")
    op.drop_column("instances", "spot_at")
    op.drop_column("instances", "donate")
    op.drop_column("instances", "kind")
    op.execute("UPDATE instances SET desired = 'draining' WHERE desired = 'spot'")
    op.execute("UPDATE instances SET observed = 'draining' WHERE observed = 'spot'")
    _known("observed", _OBSERVED)
    _known("desired", _DESIRED)
