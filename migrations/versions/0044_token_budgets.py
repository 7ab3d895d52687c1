"""Budgets of tokens."""

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0039"
branch_labels = None
depends_on = None

_BUDGETS = ("tokens_per_day", "tokens_per_month", "tokens_total")


def upgrade() -> None:
    for budget in _BUDGETS:
        op.add_column("tenants", sa.Column(budget, sa.BigInteger(), nullable=True))
    op.create_check_constraint(
        op.f("ck_tenants_budgets_positive"),
        "tenants",
        "tokens_per_day > 0 AND tokens_per_month > 0 AND tokens_total > 0",
    )
    op.create_table(
        "token_budgets",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("budget", sa.String(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("most", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("0 <= reserved AND reserved <= most", name=op.f("ck_token_budgets_reserved")),
        sa.PrimaryKeyConstraint("tenant", "budget", "starts_at", name=op.f("pk_token_budgets")),
    )


def downgrade() -> None:
    op.drop_table("token_budgets")
    op.drop_constraint(op.f("ck_tenants_budgets_positive"), "tenants")
    for budget in _BUDGETS:
        op.drop_column("tenants", budget)
