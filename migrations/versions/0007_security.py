"""Limits of tenants; scopes, models, nodes and rotation of keys."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_KEYS = "api_keys"


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrent_max", sa.BigInteger(), nullable=True),
        sa.Column("queued_batch_tokens_max", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "requests_per_minute > 0 AND tokens_per_minute > 0 AND concurrent_max > 0", name=op.f("ck_tenants_positive")
        ),
        sa.CheckConstraint("queued_batch_tokens_max >= 0", name=op.f("ck_tenants_queued_positive")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
    )
    op.add_column("batches", sa.Column("models", postgresql.JSONB(), nullable=True))
    op.add_column(_KEYS, sa.Column("scopes", postgresql.JSONB(), nullable=True))
    op.add_column(_KEYS, sa.Column("models", postgresql.JSONB(), nullable=True))
    op.add_column(_KEYS, sa.Column("node", sa.String(), nullable=True))
    op.add_column(_KEYS, sa.Column("old_secret_hash", sa.String(), nullable=True))
    op.add_column(_KEYS, sa.Column("old_until", sa.DateTime(timezone=True), nullable=True))
    op.create_unique_constraint(op.f("uq_api_keys_old_secret_hash"), _KEYS, ["old_secret_hash"])
    op.create_check_constraint(op.f("ck_api_keys_node_of_node_keys"), _KEYS, "node IS NULL OR role = 'node'")
    op.create_check_constraint(
        op.f("ck_api_keys_old_until_then"), _KEYS, "(old_secret_hash IS NULL) = (old_until IS NULL)"
    )


def downgrade() -> None:
    """Narrowed keys are revoked, since the older schema would give them all rights of their role."""
    op.execute(
        "UPDATE api_keys SET revoked_at = now() WHERE revoked_at IS NULL"
        " AND (scopes IS NOT NULL OR models IS NOT NULL OR node IS NOT NULL)"
    )
    op.drop_constraint(op.f("ck_api_keys_old_until_then"), _KEYS, type_="check")
    op.drop_constraint(op.f("ck_api_keys_node_of_node_keys"), _KEYS, type_="check")
    op.drop_constraint(op.f("uq_api_keys_old_secret_hash"), _KEYS, type_="unique")
    for column in ("old_until", "old_secret_hash", "node", "models", "scopes"):
        op.drop_column(_KEYS, column)
    op.drop_column("batches", "models")
    op.drop_table("tenants")
