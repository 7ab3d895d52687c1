"""The tables of demand and its forecasts. Positions on the demand axis are whole seconds since the epoch (`_s`)."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Index, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.store.tables import Base, Json


class DemandBucket(Base):
    """Input tokens per second of one minute. `kind`: IW (both interactive tiers) or NIW. No row of kind IW is zero
    where minute and endpoint were measured (`DemandMinute`, `DemandSpan`); any other minute without a row is a gap.
    `imported_at`: when it was imported; None: it was measured.
    """

    __tablename__ = "demand_buckets"
    __table_args__ = (
        CheckConstraint("kind IN ('IW', 'NIW')", name="kind_known"),
        CheckConstraint("mod(start_s, 60) = 0", name="minute"),
        CheckConstraint("tokens_per_s >= 0", name="positive"),
        Index("ix_demand_buckets_start_s", "start_s"),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    start_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tokens_per_s: Mapped[float]
    imported_at: Mapped[datetime | None]


class DemandMinute(Base):
    """A minute that was measured: some gateway was counting in it."""

    __tablename__ = "demand_minutes"
    __table_args__ = (CheckConstraint("mod(start_s, 60) = 0", name="minute"),)
    start_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class DemandSpan(Base):
    """An endpoint is measured from the minute `since_s` until before `until_s`; None: it is still."""

    __tablename__ = "demand_spans"
    __table_args__ = (
        CheckConstraint("until_s > since_s", name="order"),
        Index("uq_demand_spans_open", "model", "region", unique=True, postgresql_where=text("until_s IS NULL")),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    since_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    until_s: Mapped[int | None]


class Forecast(Base):
    """What one series was expected to reach in the hour after `origin_s`, and who said so. `candidates` and `state`
    take kilobytes each and are read only where they are asked for.
    """

    __tablename__ = "forecasts"
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    origin_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    forecaster: Mapped[str]
    peak_q50: Mapped[float]
    peak_upper: Mapped[float]
    quantile: Mapped[float]
    path: Mapped[list[Any]]
    candidates: Mapped[Json] = mapped_column(deferred=True)
    state: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    reason: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
