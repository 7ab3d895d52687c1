"""The tables of aliases and of the roll-outs under them."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.policies.lifecycle import RolloutState
from controlplane.store.tables import Base, Json, Owned, one_of


class Alias(Owned, Base):
    """A name for models. It may be that of a model, whose requests it then decides."""

    __tablename__ = "aliases"
    name: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AliasTarget(Base):
    """A model of an alias; it gets its weight's share of the sum of the alias's weights."""

    __tablename__ = "alias_targets"
    __table_args__ = (CheckConstraint("weight >= 0", name="positive"), Index("ix_alias_targets_model", "model"))
    alias: Mapped[str] = mapped_column(ForeignKey("aliases.name", ondelete="CASCADE"), primary_key=True)
    model: Mapped[str] = mapped_column(ForeignKey("models.name"), primary_key=True)
    weight: Mapped[int]


class Rollout(Base):
    """A model, the candidate, that replaces those of an alias step by step; at most one of an alias at a time.

    `reason`: what it waits for, or why it ended. `before`: the weights when it began, and `instances`: the most ready
    instances that these models have had since, by model and region. `steps`: the candidate's shares in percent; `step`:
    the index of the one in force since `step_at`, -1 before the first; `skips`: an operator ended the step. `counted`:
    what the counters of answers stood at, see `store.rollouts`. The other columns are as in
    `policies.rollout.RolloutFacts`.
    """

    __tablename__ = "rollouts"
    __table_args__ = (
        one_of("state", RolloutState),
        CheckConstraint("(ended_at IS NOT NULL) = (state IN ('done', 'rolled_back'))", name="ended"),
        Index("uq_rollouts_live", "alias", unique=True, postgresql_where=text("ended_at IS NULL")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(ForeignKey("aliases.name", ondelete="CASCADE"))
    model: Mapped[str]
    state: Mapped[str]
    reason: Mapped[str]
    before: Mapped[Json]
    instances: Mapped[Json]
    steps: Mapped[list[Any]]
    step: Mapped[int]
    skips: Mapped[bool] = mapped_column(server_default=text("false"))
    hold_s: Mapped[float]
    answers_min: Mapped[int]
    worse_max: Mapped[float]
    keep: Mapped[bool]
    counted: Mapped[Json]
    created_by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    step_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
