"""Sessions of people at the console, their sign-in links, and sign-ins at an OpenID provider. The callers of idempotent
requests need no key any more.
"""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

CALLER = "fk_idempotency_keys_api_key_id"


def upgrade() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.Column("issuer", sa.String(), nullable=True),
        sa.Column("id_token", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_console_sessions")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_console_sessions_secret_hash")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_console_sessions_key_id")),
        sa.CheckConstraint("source IN ('key', 'link', 'oidc')", name=op.f("ck_console_sessions_source_known")),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'admin')", name=op.f("ck_console_sessions_role_of_people")),
        sa.CheckConstraint("source = 'oidc' OR key_id IS NOT NULL", name=op.f("ck_console_sessions_key_then")),
        sa.CheckConstraint("(source = 'oidc') = (issuer IS NOT NULL)", name=op.f("ck_console_sessions_issuer_then")),
    )
    for column in ("key_id", "subject", "ends_at"):
        op.create_index(op.f(f"ix_console_sessions_{column}"), "console_sessions", [column])
    op.create_table(
        "console_links",
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("secret_hash", name=op.f("pk_console_links")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_console_links_key_id")),
    )
    op.create_index(op.f("ix_console_links_ends_at"), "console_links", ["ends_at"])
    op.create_table(
        "console_flows",
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("nonce", sa.String(), nullable=False),
        sa.Column("verifier", sa.String(), nullable=False),
        sa.Column("place", sa.String(), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("secret_hash", name=op.f("pk_console_flows")),
    )
    op.create_index(op.f("ix_console_flows_ends_at"), "console_flows", ["ends_at"])
    op.drop_constraint(op.f(CALLER), "idempotency_keys", type_="foreignkey")


def downgrade() -> None:
    op.execute("DELETE FROM idempotency_keys WHERE api_key_id NOT IN (SELECT id FROM api_keys)")
    op.create_foreign_key(op.f(CALLER), "idempotency_keys", "api_keys", ["api_key_id"], ["id"])
    for table in ("console_flows", "console_links", "console_sessions"):
        op.drop_table(table)
