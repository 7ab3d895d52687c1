"""Objectives of models; latencies between regions."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("slo", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.create_table(
        "region_latencies",
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("destination", sa.String(), nullable=False),
        sa.Column("ms", sa.Float(), nullable=False),
        sa.CheckConstraint("ms >= 0", name=op.f("ck_region_latencies_positive")),
        sa.ForeignKeyConstraint(
            ["origin"], ["regions.name"], name=op.f("fk_region_latencies_origin"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["destination"], ["regions.name"], name=op.f("fk_region_latencies_destination"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("origin", "destination", name=op.f("pk_region_latencies")),
    )


def downgrade() -> None:
    op.drop_table("region_latencies")
    op.drop_column("models", "slo")
