"""The first schema."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "role IN ('admin', 'operator', 'viewer', 'client', 'node')", name=op.f("ck_api_keys_role_known")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
    )
    op.create_table(
        "audit_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("before", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("after", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    op.create_table(
        "demand_buckets",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("start_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.CheckConstraint("kind IN ('IW', 'NIW')", name=op.f("ck_demand_buckets_kind_known")),
        sa.CheckConstraint("mod(start_s, 60) = 0", name=op.f("ck_demand_buckets_minute")),
        sa.CheckConstraint("tokens_per_s >= 0", name=op.f("ck_demand_buckets_positive")),
        sa.PrimaryKeyConstraint("model", "region", "kind", "start_s", name=op.f("pk_demand_buckets")),
    )
    op.create_index("ix_demand_buckets_start_s", "demand_buckets", ["start_s"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("purpose IN ('batch', 'batch_output')", name=op.f("ck_files_purpose_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_tenant", "files", ["tenant", "created_at", "id"], unique=False)
    op.create_table(
        "fleet",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("index", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_fleet_single")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fleet")),
    )
    op.create_table(
        "forecasts",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("origin_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("forecaster", sa.String(), nullable=False),
        sa.Column("peak_q50", sa.Double(), nullable=False),
        sa.Column("peak_upper", sa.Double(), nullable=False),
        sa.Column("quantile", sa.Double(), nullable=False),
        sa.Column("path", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("candidates", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("model", "region", "origin_s", name=op.f("pk_forecasts")),
    )
    op.create_table(
        "gpu_types",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cost_per_hour", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("memory_bytes > 0 AND cost_per_hour >= 0", name=op.f("ck_gpu_types_positive")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_gpu_types")),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("kv_bytes_per_token", sa.BigInteger(), nullable=False),
        sa.Column("context_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("weights_bytes > 0 AND context_tokens > 0", name=op.f("ck_models_positive")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("window_start_s", sa.BigInteger(), nullable=False),
        sa.Column("fleet_index", sa.BigInteger(), nullable=False),
        sa.Column("solver", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("objective_per_hour", sa.Double(), nullable=True),
        sa.Column("bound_per_hour", sa.Double(), nullable=True),
        sa.Column("gap", sa.Double(), nullable=True),
        sa.Column("solve_time_s", sa.Double(), nullable=False),
        sa.Column("unserved", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("origin IN ('schedule', 'operator')", name=op.f("ck_plans_origin_known")),
        sa.CheckConstraint(
            "state IN ('draft', 'approved', 'applying', 'applied', 'superseded', 'failed', 'rolled_back')",
            name=op.f("ck_plans_state_known"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
    )
    op.create_index(
        "uq_plans_in_force",
        "plans",
        ["state"],
        unique=True,
        postgresql_where=sa.text("state IN ('applying', 'applied')"),
    )
    op.create_index(
        "uq_plans_schedule_window",
        "plans",
        ["window_start_s"],
        unique=True,
        postgresql_where=sa.text("origin = 'schedule'"),
    )
    op.create_table(
        "regions",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_regions")),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("input_file_id", sa.String(), nullable=False),
        sa.Column("output_file_id", sa.String(), nullable=True),
        sa.Column("error_file_id", sa.String(), nullable=True),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("errors", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("in_progress_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finalizing_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelling_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled')",
            name=op.f("ck_batches_state_known"),
        ),
        sa.ForeignKeyConstraint(["error_file_id"], ["files.id"], name=op.f("fk_batches_error_file_id")),
        sa.ForeignKeyConstraint(["input_file_id"], ["files.id"], name=op.f("fk_batches_input_file_id")),
        sa.ForeignKeyConstraint(["output_file_id"], ["files.id"], name=op.f("fk_batches_output_file_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_tenant", "batches", ["tenant", "created_at", "id"], unique=False)
    op.create_table(
        "endpoints",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("instances_min", sa.BigInteger(), nullable=False),
        sa.Column("instances_max", sa.BigInteger(), nullable=False),
        sa.Column("last_scaled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("0 <= instances_min AND instances_min <= instances_max", name=op.f("ck_endpoints_limits")),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_endpoints_model"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["region"], ["regions.name"], name=op.f("fk_endpoints_region")),
        sa.PrimaryKeyConstraint("model", "region", name=op.f("pk_endpoints")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("api_key_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("request_hash", sa.String(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_idempotency_keys_api_key_id")),
        sa.PrimaryKeyConstraint("api_key_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("engine", sa.String(), nullable=False),
        sa.Column("draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["gpu_type"], ["gpu_types.name"], name=op.f("fk_nodes_gpu_type")),
        sa.ForeignKeyConstraint(["region"], ["regions.name"], name=op.f("fk_nodes_region")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_nodes")),
    )
    op.create_table(
        "plan_entries",
        sa.Column("plan_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("before", sa.BigInteger(), nullable=False),
        sa.Column("after", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name=op.f("fk_plan_entries_plan_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("plan_id", "model", "region", "gpu_type", name=op.f("pk_plan_entries")),
    )
    op.create_table(
        "profiles",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("load_time_s", sa.Double(), nullable=False),
        sa.CheckConstraint("tokens_per_s > 0 AND gpus > 0 AND load_time_s >= 0", name=op.f("ck_profiles_positive")),
        sa.ForeignKeyConstraint(["gpu_type"], ["gpu_types.name"], name=op.f("fk_profiles_gpu_type")),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_profiles_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "gpu_type", name=op.f("pk_profiles")),
    )
    op.create_table(
        "batch_requests",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("line", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), server_default=sa.text("'waiting'"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_id", sa.String(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "(state = 'running') = (lease_id IS NOT NULL)", name=op.f("ck_batch_requests_lease_while_running")
        ),
        sa.CheckConstraint(
            "state IN ('waiting', 'running', 'completed', 'failed', 'expired', 'cancelled')",
            name=op.f("ck_batch_requests_state_known"),
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_requests_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch_requests")),
        sa.UniqueConstraint("batch_id", "custom_id", name=op.f("uq_batch_requests_batch_id_custom_id")),
        sa.UniqueConstraint("batch_id", "line", name=op.f("uq_batch_requests_batch_id_line")),
    )
    op.create_index(
        "ix_batch_requests_claim",
        "batch_requests",
        ["model", "deadline_at", "id"],
        unique=False,
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_index(
        "ix_batch_requests_leased",
        "batch_requests",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_batch_requests_open",
        "batch_requests",
        ["batch_id"],
        unique=False,
        postgresql_where=sa.text("state IN ('waiting', 'running')"),
    )
    op.create_table(
        "slots",
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("gpus > 0 AND memory_bytes > 0", name=op.f("ck_slots_positive")),
        sa.ForeignKeyConstraint(["node"], ["nodes.name"], name=op.f("fk_slots_node"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node", "index", name=op.f("pk_slots")),
    )
    op.create_table(
        "batch_results",
        sa.Column("request_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("status_code", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.JSON(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("upstream_id", sa.String(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["batch_requests.id"], name=op.f("fk_batch_results_request_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_batch_results")),
    )
    op.create_table(
        "instances",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("desired", sa.String(), nullable=False),
        sa.Column("observed", sa.String(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("desired IN ('running', 'draining', 'stopped')", name=op.f("ck_instances_desired_known")),
        sa.CheckConstraint(
            "observed IN ('pending', 'loading', 'ready', 'draining', 'stopped', 'failed')",
            name=op.f("ck_instances_observed_known"),
        ),
        sa.ForeignKeyConstraint(["gpu_type"], ["gpu_types.name"], name=op.f("fk_instances_gpu_type")),
        sa.ForeignKeyConstraint(
            ["model", "region"], ["endpoints.model", "endpoints.region"], name=op.f("fk_instances_model_region")
        ),
        sa.ForeignKeyConstraint(["node", "slot"], ["slots.node", "slots.index"], name=op.f("fk_instances_node_slot")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instances")),
    )
    op.create_index(
        "ix_instances_live", "instances", ["node"], unique=False, postgresql_where=sa.text("desired <> 'stopped'")
    )
    op.execute("INSERT INTO fleet (id, index) VALUES (1, 0)")


def downgrade() -> None:
    op.drop_index("ix_instances_live", table_name="instances", postgresql_where=sa.text("desired <> 'stopped'"))
    op.drop_table("instances")
    op.drop_table("batch_results")
    op.drop_table("slots")
    op.drop_index(
        "ix_batch_requests_open",
        table_name="batch_requests",
        postgresql_where=sa.text("state IN ('waiting', 'running')"),
    )
    op.drop_index(
        "ix_batch_requests_leased", table_name="batch_requests", postgresql_where=sa.text("state = 'running'")
    )
    op.drop_index("ix_batch_requests_claim", table_name="batch_requests", postgresql_where=sa.text("state = 'waiting'"))
    op.drop_table("batch_requests")
    op.drop_table("profiles")
    op.drop_table("plan_entries")
    op.drop_table("nodes")
    op.drop_table("idempotency_keys")
    op.drop_table("endpoints")
    op.drop_index("ix_batches_tenant", table_name="batches")
    op.drop_table("batches")
    op.drop_table("regions")
    op.drop_index("uq_plans_schedule_window", table_name="plans", postgresql_where=sa.text("origin = 'schedule'"))
    op.drop_index("uq_plans_in_force", table_name="plans", postgresql_where=sa.text("state IN ('applying', 'applied')"))
    op.drop_table("plans")
    op.drop_table("models")
    op.drop_table("gpu_types")
    op.drop_table("forecasts")
    op.drop_table("fleet")
    op.drop_index("ix_files_tenant", table_name="files")
    op.drop_table("files")
    op.drop_index("ix_demand_buckets_start_s", table_name="demand_buckets")
    op.drop_table("demand_buckets")
    op.drop_table("audit_events")
    op.drop_table("api_keys")
