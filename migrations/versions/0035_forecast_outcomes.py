"""Forecasts keep the peak that came."""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("forecasts", sa.Column("actual_peak", sa.Float(), nullable=True))
    op.create_index(op.f("ix_forecasts_origin_s"), "forecasts", ["origin_s"])


def downgrade() -> None:
    op.drop_index(op.f("ix_forecasts_origin_s"), table_name="forecasts")
    op.drop_column("forecasts", "actual_peak")
