"""Models that embed or score, and how tool calls and reasoning are found in a model's answers."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("task", sa.String(), server_default=sa.text("'generate'"), nullable=False))
    op.add_column("models", sa.Column("tool_parser", sa.String(), nullable=True))
    op.add_column("models", sa.Column("reasoning_parser", sa.String(), nullable=True))
    op.create_check_constraint(op.f("ck_models_task"), "models", "task IN ('generate', 'embed', 'score')")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_models_task"), "models")
    for column in ("reasoning_parser", "tool_parser", "task"):
        op.drop_column("models", column)
