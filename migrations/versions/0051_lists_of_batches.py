"""A page of a tenant's batches is found by an index."""

from migrations.indexes import replace_index

revision = "0051"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    replace_index("ix_batches_tenant", "batches", ["tenant", "id"])


def downgrade() -> None:
    replace_index("ix_batches_tenant", "batches", ["tenant", "created_at", "id"])
