"""A page of a tenant's batches is found by an index."""

from alembic import op

revision = "0051"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_batches_tenant", "batches")
    op.create_index("ix_batches_tenant", "batches", ["tenant", "id"])


def downgrade() -> None:
    op.drop_index("ix_batches_tenant", "batches")
    op.create_index("ix_batches_tenant", "batches", ["tenant", "created_at", "id"])
