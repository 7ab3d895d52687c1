"""Minutes without demand have no row: they follow from the measured minutes and the endpoints of the time."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_ZEROS = """
INSERT INTO demand_buckets (model, region, kind, start_s, tokens_per_s)
SELECT span.model, span.region, 'IW', minute.start_s, 0
FROM demand_spans AS span
JOIN demand_minutes AS minute
    ON minute.start_s >= span.since_s AND (span.until_s IS NULL OR minute.start_s < span.until_s)
ON CONFLICT DO NOTHING
"""


def upgrade() -> None:
    op.create_table(
        "demand_minutes",
        sa.Column("start_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.CheckConstraint("mod(start_s, 60) = 0", name=op.f("ck_demand_minutes_minute")),
        sa.PrimaryKeyConstraint("start_s", name=op.f("pk_demand_minutes")),
    )
    op.create_table(
        "demand_spans",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("since_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("until_s", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("until_s > since_s", name=op.f("ck_demand_spans_order")),
        sa.PrimaryKeyConstraint("model", "region", "since_s", name=op.f("pk_demand_spans")),
    )
    op.create_index(
        "uq_demand_spans_open",
        "demand_spans",
        ["model", "region"],
        unique=True,
        postgresql_where=sa.text("until_s IS NULL"),
    )


def downgrade() -> None:
    op.execute(_ZEROS)
    op.drop_index("uq_demand_spans_open", table_name="demand_spans", postgresql_where=sa.text("until_s IS NULL"))
    op.drop_table("demand_spans")
    op.drop_table("demand_minutes")
