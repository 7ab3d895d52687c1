"""Events of instances, nodes and plans, written by triggers in the transaction of the change."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_INSTANCES = """
CREATE FUNCTION note_instance() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    retried CONSTANT boolean := TG_OP = 'UPDATE' AND NEW.error IS NOT NULL AND OLD.error IS NOT NULL
        AND NEW.observed IN ('loading', 'failed') AND OLD.observed IN ('loading', 'failed');
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO events (kind, what, subject, model, region, node, message) VALUES ('instance', 'placed', NEW.id,
            NEW.model, NEW.region, NEW.node, 'on slot ' || NEW.slot || CASE WHEN NEW.pooled THEN ', pooled' ELSE ''
            END);
        RETURN NULL;
    END IF;
    IF NEW.engine <> OLD.engine THEN
        INSERT INTO events (kind, what, subject, model, region, node, message) VALUES ('instance', 'engine', NEW.id,
            NEW.model, NEW.region, NEW.node, OLD.engine || ' -> ' || NEW.engine || COALESCE(': ' || NEW.engine_reason,
            ''));
    END IF;
    IF NEW.desired <> OLD.desired THEN
        INSERT INTO events (kind, what, subject, model, region, node, message) VALUES ('instance',
            CASE NEW.desired WHEN 'running' THEN 'taken back' ELSE NEW.desired END,
            NEW.id, NEW.model, NEW.region, NEW.node, 'was ' || OLD.desired);
    END IF;
    IF NEW.observed <> OLD.observed AND NEW.desired <> 'stopped' AND NEW.observed <> NEW.desired AND NOT retried THEN
        INSERT INTO events (kind, what, subject, model, region, node, message) VALUES ('instance', NEW.observed, NEW.id,
            NEW.model, NEW.region, NEW.node,
            CASE WHEN NEW.engine <> OLD.engine THEN 'anew' WHEN NEW.observed = 'pending'
                THEN 'its node does not report it' ELSE NEW.error END);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_instance AFTER INSERT OR UPDATE OF desired, observed, engine ON instances
    FOR EACH ROW EXECUTE FUNCTION note_instance();
"""

_NODES = """
CREATE FUNCTION note_node() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO events (kind, what, subject, region, node) VALUES ('node', 'deleted', OLD.name, OLD.region,
        OLD.name); RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        INSERT INTO events (kind, what, subject, region, node, message) VALUES ('node', 'joined', NEW.name, NEW.region,
            NEW.name, NEW.gpu_type || ' at ' || NEW.url);
        RETURN NULL;
    END IF;
    IF NEW.draining <> OLD.draining THEN
        INSERT INTO events (kind, what, subject, region, node) VALUES ('node',
            CASE WHEN NEW.draining THEN 'draining' ELSE 'in service' END, NEW.name, NEW.region, NEW.name);
    END IF;
    IF NEW.leaving AND NOT OLD.leaving THEN
        INSERT INTO events (kind, what, subject, region, node, message) VALUES ('node', 'leaving', NEW.name, NEW.region,
            NEW.name, 'its agent shuts down');
    END IF;
    IF NEW.last_seen_at > OLD.last_seen_at AND EXISTS (SELECT FROM events WHERE subject = NEW.name AND kind = 'node'
            AND what = 'lost' AND at > OLD.last_seen_at) THEN
        INSERT INTO events (kind, what, subject, region, node, message) VALUES ('node', 'returned', NEW.name,
        NEW.region,
            NEW.name, 'after ' || round(extract(epoch FROM NEW.last_seen_at - OLD.last_seen_at)) || ' s');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_node_change AFTER UPDATE ON nodes FOR EACH ROW WHEN (NEW.draining <> OLD.draining
    OR NEW.leaving <> OLD.leaving OR NEW.last_seen_at - OLD.last_seen_at > interval '30 seconds')
    EXECUTE FUNCTION note_node();
CREATE TRIGGER note_node AFTER INSERT OR DELETE ON nodes FOR EACH ROW EXECUTE FUNCTION note_node();
"""

_PLANS = """
CREATE FUNCTION note_plan() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state NOT IN ('approved', 'applying') AND (TG_OP = 'INSERT' OR NEW.state <> OLD.state) THEN
        INSERT INTO events (kind, what, subject, message) VALUES ('plan', NEW.state, NEW.id,
            left(CASE WHEN NEW.state = 'draft' AND NEW.approval_reason IS NOT NULL
                THEN 'waits for an operator: ' || NEW.approval_reason ELSE NEW.reason END, 1000));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_plan AFTER INSERT OR UPDATE OF state ON plans FOR EACH ROW EXECUTE FUNCTION note_plan();
"""


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("what", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("region", sa.String(), nullable=True),
        sa.Column("node", sa.String(), nullable=True),
        sa.Column("message", sa.String(), nullable=True),
        sa.CheckConstraint("kind IN ('instance', 'node', 'plan')", name=op.f("ck_events_kind_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_at", "events", ["at"])
    op.create_index("ix_events_subject", "events", ["subject", "id"])
    for statements in (_INSTANCES, _NODES, _PLANS):
        op.execute(sa.text(statements.replace(":", r"\:")))


def downgrade() -> None:
    op.execute("DROP TRIGGER note_plan ON plans")
    op.execute("DROP TRIGGER note_node ON nodes")
    op.execute("DROP TRIGGER note_node_change ON nodes")
    op.execute("DROP TRIGGER note_instance ON instances")
    for name in ("note_plan", "note_node", "note_instance"):
        op.execute(f"DROP FUNCTION {name}()")
    op.drop_table("events")
