"""Counts of unfinished batches by model, from which the size of a batch's requests is learned.

Stop all dispatchers of the previous version before the upgrade: their statement that writes results names the old key
and is refused. Earlier results of batches of several models stay counted, under no model.
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batch_counts", sa.Column("model", sa.String(), server_default="", nullable=False))
    op.execute(
        "UPDATE batch_counts AS counts SET model = models.model FROM batch_models AS models"
        " WHERE models.batch_number = counts.batch_number AND NOT EXISTS (SELECT FROM batch_models AS other"
        " WHERE other.batch_number = models.batch_number AND other.model <> models.model)"
    )
    op.alter_column("batch_counts", "model", server_default=None)
    op.drop_constraint(op.f("pk_batch_counts"), "batch_counts", type_="primary")
    op.create_primary_key(op.f("pk_batch_counts"), "batch_counts", ["batch_number", "model", "part"])


def downgrade() -> None:
    op.execute(
        "CREATE TEMP TABLE summed ON COMMIT DROP AS SELECT batch_number, part, sum(completed) AS completed,"
        " sum(failed) AS failed, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens"
        " FROM batch_counts GROUP BY batch_number, part"
    )
    op.execute("DELETE FROM batch_counts")
    op.drop_constraint(op.f("pk_batch_counts"), "batch_counts", type_="primary")
    op.drop_column("batch_counts", "model")
    op.create_primary_key(op.f("pk_batch_counts"), "batch_counts", ["batch_number", "part"])
    op.execute(
        "INSERT INTO batch_counts (batch_number, part, completed, failed, input_tokens, output_tokens)"
        " SELECT * FROM summed"
    )
