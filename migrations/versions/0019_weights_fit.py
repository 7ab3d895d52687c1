"""Parameters of models, data types of nodes, and weight memory of slots, to decide whether weights fit."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("parameters", sa.BigInteger(), nullable=True))
    op.create_check_constraint(op.f("ck_models_parameters_positive"), "models", "parameters > 0")
    op.add_column("nodes", sa.Column("dtype", sa.String(), nullable=True))
    op.add_column("slots", sa.Column("weights_bytes", sa.BigInteger(), nullable=True))
    op.create_check_constraint(op.f("ck_slots_weights_bytes_positive"), "slots", "weights_bytes > 0")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_slots_weights_bytes_positive"), "slots", type_="check")
    op.drop_column("slots", "weights_bytes")
    op.drop_column("nodes", "dtype")
    op.drop_constraint(op.f("ck_models_parameters_positive"), "models", type_="check")
    op.drop_column("models", "parameters")
