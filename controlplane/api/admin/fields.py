"""Types of names, numbers and pages that the admin API takes. Every one has its limit."""

import re
from typing import Annotated, Generic, TypeVar

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from controlplane.declarations import INT64_MAX, TEXT, GpuTypeName, ModelName, OwnerName, RegionName
from controlplane.store.rows import PAGE_MAX, Page
from controlplane.store.tables import Base

TIME_S_MAX = 253_402_300_799
"""The last second of the year 9999."""

_NODE = r"^[^\x00-\x1f\x7f-\x9f/]{1,200}$"
ID_PATTERN = r"^[^\x00-\x1f\x7f-\x9f/]{1,64}$"
NODE_NAME = re.compile(_NODE)
_SLASHES = "it may contain '/', but no new one an empty part, '.' or '..'"

RegionPath = Annotated[RegionName, Path(description="the region's name")]
GpuTypePath = Annotated[GpuTypeName, Path(description="the GPU type's name")]
ModelPath = Annotated[ModelName, Path(description=f"the model's name; {_SLASHES}")]
NodePath = Annotated[str, Path(pattern=_NODE, examples=["node-us-east-1"])]
PinPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["pin_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
RolloutPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["rollout_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
AliasPath = Annotated[ModelName, Path(description=f"the alias; {_SLASHES}")]
NodeName = Annotated[str, Field(pattern=_NODE, examples=["node-us-east-1"])]
PlanPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
RunPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["whatif_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
InstancePath = Annotated[str, Path(pattern=ID_PATTERN, examples=["inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
RequestPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", examples=["req_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
KeyPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="rows of a page")]
After = Annotated[
    str | None, Query(max_length=300, pattern=TEXT, description="`next` of the page before; none: the first page")
]
AfterId = Annotated[
    int | None, Query(ge=1, le=INT64_MAX, description="`next` of the page before; none: the first page")
]
Owner = Annotated[
    OwnerName | None, Query(description="the name of the fleet's file that it is in from now on; left out: it stays")
]
FilterWord = Annotated[str | None, Query(max_length=300, pattern=TEXT, description="only those that have just this")]

Data = TypeVar("Data", bound=BaseModel)
Row = TypeVar("Row", bound=Base)


class Answer(BaseModel):
    """What a client gets, read from a row."""

    model_config = ConfigDict(from_attributes=True)


class OwnedAnswer(Answer):
    """What a fleet's file may have made."""

    owner: str | None = Field(description="the fleet's file that made it; null: it was made by hand")


class PageOf(BaseModel, Generic[Data]):
    """One page. `next` goes into `after` of the next request while `has_more`."""

    data: list[Data]
    has_more: bool
    next: str | None


def page_of(kind: type[Data], page: Page[Row]) -> PageOf[Data]:
    """A page of rows as the API answers it."""
    return PageOf(data=[kind.model_validate(row) for row in page.rows], has_more=page.has_more, next=page.next)
