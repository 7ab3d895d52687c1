"""A model with endpoints cannot be deleted; before, its endpoints were deleted with it."""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_NAME = "fk_endpoints_model"


def upgrade() -> None:
    op.drop_constraint(op.f(_NAME), "endpoints", type_="foreignkey")
    op.create_foreign_key(op.f(_NAME), "endpoints", "models", ["model"], ["name"])


def downgrade() -> None:
    op.drop_constraint(op.f(_NAME), "endpoints", type_="foreignkey")
    op.create_foreign_key(op.f(_NAME), "endpoints", "models", ["model"], ["name"], ondelete="CASCADE")
