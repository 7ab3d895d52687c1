"""Inputs, approval and predecessor of plans; replica overrides; the state of forecasts."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_STATES = "'draft', 'approved', 'applying', 'applied', 'superseded', 'failed', 'rolled_back'"
_JSONB = postgresql.JSONB(astext_type=sa.Text())


def _schedule_window(where: str) -> None:
    """At most one scheduled plan per window, among those of `where`."""
    op.create_index(
        "uq_plans_schedule_window", "plans", ["window_start_s"], unique=True, postgresql_where=sa.text(where)
    )


def _known_states(states: str) -> None:
    op.drop_constraint(op.f("ck_plans_state_known"), "plans", type_="check")
    op.create_check_constraint(op.f("ck_plans_state_known"), "plans", f"state IN ({states})")


def upgrade() -> None:
    op.add_column("forecasts", sa.Column("state", _JSONB, nullable=True))
    op.add_column("plans", sa.Column("inputs", _JSONB, nullable=True))
    op.add_column("plans", sa.Column("pools", _JSONB, server_default=sa.text("'[]'"), nullable=False))
    op.add_column("plans", sa.Column("previous_plan_id", sa.String(), nullable=True))
    op.add_column("plans", sa.Column("approval_reason", sa.String(), nullable=True))
    op.add_column("plans", sa.Column("approved_by", sa.String(), nullable=True))
    op.add_column("plans", sa.Column("approved_at", sa.DateTime(timezone=True), nullable=True))
    op.create_foreign_key(op.f("fk_plans_previous_plan_id"), "plans", "plans", ["previous_plan_id"], ["id"])
    _known_states(f"{_STATES}, 'rejected'")
    op.drop_index("uq_plans_schedule_window", table_name="plans")
    _schedule_window("origin = 'schedule' AND state <> 'failed'")
    op.add_column(
        "plan_entries", sa.Column("constraint", sa.String(), server_default=sa.text("'none'"), nullable=False)
    )
    op.add_column("plan_entries", sa.Column("cost_if_not", sa.Double(), server_default=sa.text("0"), nullable=False))
    op.create_table(
        "pins",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("instances", sa.BigInteger(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("instances >= 0", name=op.f("ck_pins_positive")),
        sa.ForeignKeyConstraint(
            ["model", "region"],
            ["endpoints.model", "endpoints.region"],
            name=op.f("fk_pins_model_region"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pins")),
    )
    op.create_index(
        "uq_pins_live", "pins", ["model", "region"], unique=True, postgresql_where=sa.text("removed_at IS NULL")
    )


def downgrade() -> None:
    """Pins, inputs and reasons are lost; a rejected plan is called superseded, and failed attempts that were made good
    in the same window are deleted, since the older schema allows one scheduled plan there.
    """
    op.drop_index("uq_pins_live", table_name="pins", postgresql_where=sa.text("removed_at IS NULL"))
    op.drop_table("pins")
    op.drop_column("plan_entries", "cost_if_not")
    op.drop_column("plan_entries", "constraint")
    op.drop_constraint(op.f("fk_plans_previous_plan_id"), "plans", type_="foreignkey")
    op.execute(
        "DELETE FROM plans AS old WHERE old.origin = 'schedule' AND old.state = 'failed' AND EXISTS ("
        "SELECT 1 FROM plans AS other WHERE other.origin = 'schedule' AND other.window_start_s = old.window_start_s"
        " AND (other.state <> 'failed' OR other.id > old.id))"
    )
    op.drop_index("uq_plans_schedule_window", table_name="plans")
    _schedule_window("origin = 'schedule'")
    op.execute("UPDATE plans SET state = 'superseded' WHERE state = 'rejected'")
    _known_states(_STATES)
    for column in ("approved_at", "approved_by", "approval_reason", "previous_plan_id", "pools", "inputs"):
        op.drop_column("plans", column)
    op.drop_column("forecasts", "state")
