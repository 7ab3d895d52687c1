"""The table of usage."""

from datetime import datetime

from sqlalchemy import CheckConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.store.tables import Base


class UsageHour(Base):
    """What one process (`writer`) counted of a tenant, a model and a tier in an hour. It writes its whole count again
    and again, so writing it twice changes nothing. `failed`: those of `requests` that did not end well. Rows of old
    hours are added up, under no writer.
    """

    __tablename__ = "usage_hours"
    __table_args__ = (
        CheckConstraint(
            "requests >= failed AND failed >= 0 AND input_tokens >= 0 AND output_tokens >= 0", name="positive"
        ),
        Index("ix_usage_hours_tenant", "tenant", "hour"),
    )
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    writer: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    failed: Mapped[int]
    input_tokens: Mapped[int]
    output_tokens: Mapped[int]
