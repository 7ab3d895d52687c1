"""What a what-if run changes of the running fleet."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from controlplane.errors import InvalidValueError
from controlplane.store.fleet import known_names
from controlplane.store.plans import get_plan

CHANGES_MAX = 50
HOURS_MAX = 168
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
Factor = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
Strategy = Literal["lt-i", "lt-u", "lt-ua", "lt-d", "reactive", "siloed", "chiron"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CapacityChange(_Part):
    """So many times as many nodes, to the nearest whole one."""

    region: Name | None = Field(None, description="none: in every region")
    gpu_type: Name | None = Field(None, description="none: of every type")
    factor: Factor = Field(examples=[0.5])


class PriceChange(_Part):
    """What a GPU of a type costs."""

    gpu_type: Name
    cost_per_hour: float = Field(strict=True, ge=0, le=1e6, allow_inf_nan=False, examples=[1.5])


class DemandChange(_Part):
    """So many times as much demand."""

    region: Name | None = Field(None, description="none: from every region")
    model: Name | None = Field(None, description="none: for every model")
    factor: Factor = Field(examples=[1.5])


class LostRegion(_Part):
    """All nodes of a region fail for some time."""

    region: Name
    after_h: float = Field(strict=True, ge=0, lt=HOURS_MAX, description="hours after the beginning")
    down_h: float = Field(strict=True, gt=0, le=HOURS_MAX, description="for so many hours")


class WhatIfChanges(_Part):
    """What differs from the running fleet; nothing given: nothing does."""

    strategy: Strategy | None = Field(None, description="none: the one in force (`scale_strategy`)")
    plan_id: Name | None = Field(
        None, description="begin with the instances that this plan wants; none: with those that run"
    )
    capacity: list[CapacityChange] = Field(default_factory=list, max_length=CHANGES_MAX)
    prices: list[PriceChange] = Field(default_factory=list, max_length=CHANGES_MAX)
    demand: list[DemandChange] = Field(default_factory=list, max_length=CHANGES_MAX)
    lost_regions: list[LostRegion] = Field(default_factory=list, max_length=CHANGES_MAX)


def check_changes(session: Session, changes: WhatIfChanges, *, hours: int) -> None:
    """Check that the changes name what there is.

    Raises:
        InvalidValueError: a name is not registered, or a region is lost after the end.
        NotFoundError: there is no such plan.
    """
    known = known_names(session)
    for table in ("capacity", "prices", "demand", "lost_regions"):
        for index, change in enumerate(getattr(changes, table)):
            for field, names in known.items():
                name = getattr(change, field, None)
                if name is not None and name not in names:
                    place = f"changes.{table}.{index}.{field}"
                    raise InvalidValueError(f"{place}: '{name}' is not registered", param=place)
    for index, lost in enumerate(changes.lost_regions):
        if lost.after_h >= hours:
            place = f"changes.lost_regions.{index}.after_h"
            raise InvalidValueError(f"{place}: {lost.after_h:g} must be below hours ({hours})", param=place)
    if changes.plan_id is not None:
        get_plan(session, changes.plan_id)
