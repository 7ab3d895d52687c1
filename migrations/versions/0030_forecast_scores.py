"""How the forecasts of each hour did, summed up once when the hour is over."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "forecast_scores",
        sa.Column("origin_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hours", sa.BigInteger(), nullable=False),
        sa.Column("covered", sa.BigInteger(), nullable=False),
        sa.Column("error_sum", sa.Float(), nullable=False),
        sa.Column("actual_sum", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("origin_s", name=op.f("pk_forecast_scores")),
    )


def downgrade() -> None:
    op.drop_table("forecast_scores")
