"""Aliases of models, roll-outs under them, answers that failed, and events of roll-outs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0045"
down_revision = "0041"
branch_labels = None
depends_on = None

_AT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", _AT, server_default=sa.text("now()"), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_aliases")),
    )
    op.create_table(
        "alias_targets",
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("weight", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("weight >= 0", name=op.f("ck_alias_targets_positive")),
        sa.ForeignKeyConstraint(
            ["alias"], ["aliases.name"], name=op.f("fk_alias_targets_alias_aliases"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_alias_targets_model_models")),
        sa.PrimaryKeyConstraint("alias", "model", name=op.f("pk_alias_targets")),
    )
    op.create_index("ix_alias_targets_model", "alias_targets", ["model"])
    _create_rollouts()
    op.add_column("objective_counts", sa.Column("failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    _allow_kinds("'instance', 'node', 'plan', 'term', 'rollout'")


def downgrade() -> None:
    op.execute("DELETE FROM events WHERE kind = 'rollout'")
    _allow_kinds("'instance', 'node', 'plan', 'term'")
    op.drop_column("objective_counts", "failed")
    op.drop_table("rollouts")
    op.drop_table("alias_targets")
    op.drop_table("aliases")


def _create_rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("before", postgresql.JSONB(), nullable=False),
        sa.Column("instances", postgresql.JSONB(), nullable=False),
        sa.Column("steps", postgresql.JSONB(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("skips", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("hold_s", sa.Float(), nullable=False),
        sa.Column("answers_min", sa.BigInteger(), nullable=False),
        sa.Column("worse_max", sa.Float(), nullable=False),
        sa.Column("keep", sa.Boolean(), nullable=False),
        sa.Column("counted", postgresql.JSONB(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", _AT, server_default=sa.text("now()"), nullable=False),
        sa.Column("step_at", _AT, server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", _AT, nullable=True),
        sa.CheckConstraint(
            "state IN ('in_progress', 'paused', 'done', 'rolled_back')", name=op.f("ck_rollouts_state_known")
        ),
        sa.CheckConstraint(
            "(ended_at IS NOT NULL) = (state IN ('done', 'rolled_back'))", name=op.f("ck_rollouts_ended")
        ),
        sa.ForeignKeyConstraint(
            ["alias"], ["aliases.name"], name=op.f("fk_rollouts_alias_aliases"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    op.create_index(
        "uq_rollouts_live", "rollouts", ["alias"], unique=True, postgresql_where=sa.text("ended_at IS NULL")
    )


def _allow_kinds(kinds: str) -> None:
    op.drop_constraint(op.f("ck_events_kind_known"), "events", type_="check")
    op.create_check_constraint(op.f("ck_events_kind_known"), "events", f"kind IN ({kinds})")
