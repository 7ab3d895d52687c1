"""A page of a tenant's files, and files past their time, are found by indexes."""

import sqlalchemy as sa
from alembic import op

from migrations.indexes import build_index, replace_index

revision = "0052"
down_revision = "0051"
branch_labels = None
depends_on = None


def upgrade() -> None:
    build_index("ix_files_expiring", "files", ["expires_at"], postgresql_where=sa.text("deleted_at IS NULL"))
    replace_index("ix_files_tenant", "files", ["tenant", "id"])


def downgrade() -> None:
    replace_index("ix_files_tenant", "files", ["tenant", "created_at", "id"])
    op.drop_index("ix_files_expiring", "files")
