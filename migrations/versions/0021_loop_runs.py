"""Last success of each loop, and since when loops are expected to run, so that none is late after the installation."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    made = sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)
    op.add_column("fleet", made)
    op.create_table(
        "loop_runs",
        sa.Column("loop", sa.String(), nullable=False),
        sa.Column("last_success_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_failure_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.Column("last_process", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("loop", name=op.f("pk_loop_runs")),
    )


def downgrade() -> None:
    op.drop_table("loop_runs")
    op.drop_column("fleet", "created_at")
