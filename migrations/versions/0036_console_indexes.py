"""Events of a model or a node, and the live instances of a model, are found by indexes."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_events_model", "events", ["model", "id"])
    op.create_index("ix_events_node", "events", ["node", "id"])
    op.create_index(
        "ix_instances_model", "instances", ["model", "region"], postgresql_where=sa.text("desired <> 'stopped'")
    )


def downgrade() -> None:
    op.drop_index("ix_instances_model", "instances")
    op.drop_index("ix_events_node", "events")
    op.drop_index("ix_events_model", "events")
