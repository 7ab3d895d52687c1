"""The tables of plans, their cells and the pins of operators."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.policies.lifecycle import PlanState
from controlplane.store.tables import Base, Json, one_of


class Plan(Base):
    """One hour's placement. The schedule makes at most one per window, failed attempts aside; at most one plan is in
    force. `approval_reason`: why it waits, or waited, for an operator. `inputs`: what the solver was told.
    """

    __tablename__ = "plans"
    __table_args__ = (
        one_of("state", PlanState),
        CheckConstraint("origin IN ('schedule', 'operator')", name="origin_known"),
        Index(
            "uq_plans_schedule_window",
            "window_start_s",
            unique=True,
            postgresql_where=text("origin = 'schedule' AND state <> 'failed'"),
        ),
        Index("uq_plans_in_force", "state", unique=True, postgresql_where=text("state IN ('applying', 'applied')")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    origin: Mapped[str]
    window_start_s: Mapped[int]
    fleet_index: Mapped[int]
    solver: Mapped[str]
    status: Mapped[str]
    objective_per_hour: Mapped[float | None]
    bound_per_hour: Mapped[float | None]
    gap: Mapped[float | None]
    solve_time_s: Mapped[float]
    unserved: Mapped[list[Any]]
    pools: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    reason: Mapped[str]
    inputs: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    previous_plan_id: Mapped[str | None] = mapped_column(ForeignKey("plans.id"))
    approval_reason: Mapped[str | None]
    approved_by: Mapped[str | None]
    approved_at: Mapped[datetime | None]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    applied_at: Mapped[datetime | None]


class PlanEntry(Base):
    """One cell of a plan: instances before and after, why, what makes it necessary, and the cost per hour of leaving it
    as it was.
    """

    __tablename__ = "plan_entries"
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id", ondelete="CASCADE"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    gpu_type: Mapped[str] = mapped_column(primary_key=True)
    before: Mapped[int]
    after: Mapped[int]
    reason: Mapped[str]
    constraint: Mapped[str] = mapped_column(server_default=text("'none'"))
    cost_if_not: Mapped[float] = mapped_column(server_default=text("0"))


class Pin(Base):
    """An operator's word: this endpoint has just so many instances until then. One live pin for each endpoint."""

    __tablename__ = "pins"
    __table_args__ = (
        CheckConstraint("instances >= 0", name="positive"),
        ForeignKeyConstraint(["model", "region"], ["endpoints.model", "endpoints.region"], ondelete="CASCADE"),
        Index("uq_pins_live", "model", "region", unique=True, postgresql_where=text("removed_at IS NULL")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    region: Mapped[str]
    instances: Mapped[int]
    until: Mapped[datetime]
    note: Mapped[str]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    removed_at: Mapped[datetime | None]
