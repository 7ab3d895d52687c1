"""The term of the primary."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "terms",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("system_identifier", sa.BigInteger(), nullable=False),
        sa.Column("timeline", sa.BigInteger(), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_terms_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_terms")),
    )


def downgrade() -> None:
    op.drop_table("terms")
