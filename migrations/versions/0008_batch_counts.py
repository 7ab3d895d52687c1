"""Counts of unfinished batches, in shards next to the results that they count.

Stop all dispatchers of the previous version before the upgrade: they write results that are not in these counts, so
that `request_counts` of a batch would be too low until it has ended. The results are kept either way.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COUNTS = ("completed", "failed", "input_tokens", "output_tokens")


def upgrade() -> None:
    op.create_table(
        "batch_counts",
        sa.Column("batch_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("part", sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        sa.PrimaryKeyConstraint("batch_number", "part", name=op.f("pk_batch_counts")),
    )
    op.execute("ALTER TABLE batch_counts SET (fillfactor = 50)")  # room for a row's next version on its own page
    op.execute(
        "INSERT INTO batch_counts (batch_number, part, completed, failed, input_tokens, output_tokens)"
        " SELECT batch_number, 0, count(*) FILTER (WHERE state = 'completed'),"
        " count(*) FILTER (WHERE state <> 'completed'), sum(input_tokens), sum(output_tokens)"
        " FROM batch_results GROUP BY batch_number"
    )


def downgrade() -> None:
    op.drop_table("batch_counts")
