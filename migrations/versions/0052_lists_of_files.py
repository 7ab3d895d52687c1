"""A page of a tenant's files is found by an index."""

from alembic import op

revision = "0052"
down_revision = "0051"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_files_tenant", "files")
    op.create_index("ix_files_tenant", "files", ["tenant", "id"])


def downgrade() -> None:
    op.drop_index("ix_files_tenant", "files")
    op.create_index("ix_files_tenant", "files", ["tenant", "created_at", "id"])
