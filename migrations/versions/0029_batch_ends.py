"""When batches will end: how fast each model's requests complete, and what follows from it for every batch."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch_speeds",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("ended", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("finished", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("busy", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("per_s", sa.Float(), nullable=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_batch_speeds")),
    )
    op.add_column("batches", sa.Column("predicted_end_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("batches", sa.Column("at_risk", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("batches", sa.Column("end_reason", sa.String(), nullable=True))


def downgrade() -> None:
    for column in ("end_reason", "at_risk", "predicted_end_at"):
        op.drop_column("batches", column)
    op.drop_table("batch_speeds")
