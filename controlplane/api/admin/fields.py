"""Types of names, numbers and pages that the admin API takes. Every one has its limit."""

import re
from typing import Annotated, Generic, TypeVar

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from controlplane.store.rows import PAGE_MAX, Page
from controlplane.store.tables import Base
from dataplane.protocol.model_sources import SOURCE_CHARACTERS_MAX, check_source

INT64_MAX = 2**63 - 1
TIME_S_MAX = 253_402_300_799
"""The last second of the year 9999."""

_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_GPU_TYPE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_MODEL = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
_NODE = r"^[^\x00-\x1f\x7f-\x9f/]{1,200}$"
ID_PATTERN = r"^[^\x00-\x1f\x7f-\x9f/]{1,64}$"
_TEXT = r"^[^\x00]*$"
NODE_NAME = re.compile(_NODE)

RegionName = Annotated[str, Field(pattern=_NAME, examples=["us-east"])]
GpuTypeName = Annotated[str, Field(pattern=_GPU_TYPE, examples=["H800"])]
ModelName = Annotated[str, Field(pattern=_MODEL, examples=["Qwen/Qwen3-8B"])]
KeyName = Annotated[str, Field(pattern=_NAME, examples=["dashboard"])]
Tenant = Annotated[str, Field(pattern=_NAME, examples=["default"])]
CheckpointPath = Annotated[
    str, Field(max_length=SOURCE_CHARACTERS_MAX, examples=["/models/qwen3-8b"]), AfterValidator(check_source)
]
Architecture = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["Qwen3ForCausalLM"])]

Note = Annotated[str, Field(max_length=500, pattern=_TEXT)]

PositiveInt = Annotated[int, Field(strict=True, gt=0, le=INT64_MAX)]
Count = Annotated[int, Field(strict=True, ge=0, le=100_000)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0, le=1e15, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=3600, allow_inf_nan=False)]
"""The duration of a step, or of a part of one."""

RegionPath = Annotated[RegionName, Path(description="the region's name")]
GpuTypePath = Annotated[GpuTypeName, Path(description="the GPU type's name")]
ModelPath = Annotated[ModelName, Path(description="the model's name; it may contain '/'")]
NodePath = Annotated[str, Path(pattern=_NODE, examples=["node-us-east-1"])]
PinPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["pin_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
NodeName = Annotated[str, Field(pattern=_NODE, examples=["node-us-east-1"])]
PlanPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
RunPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["whatif_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
InstancePath = Annotated[str, Path(pattern=ID_PATTERN, examples=["inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
RequestPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", examples=["req_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
KeyPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="rows of a page")]
After = Annotated[
    str | None, Query(max_length=300, pattern=_TEXT, description="`next` of the page before; none: the first page")
]
AfterId = Annotated[
    int | None, Query(ge=1, le=INT64_MAX, description="`next` of the page before; none: the first page")
]
FilterWord = Annotated[str | None, Query(max_length=300, pattern=_TEXT, description="only those that have just this")]

Data = TypeVar("Data", bound=BaseModel)
Row = TypeVar("Row", bound=Base)


class Body(BaseModel):
    """What a client sends. A field that is not known is an error, never ignored."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """What a client gets, read from a row."""

    model_config = ConfigDict(from_attributes=True)


class PageOf(BaseModel, Generic[Data]):
    """One page. `next` goes into `after` of the next request while `has_more`."""

    data: list[Data]
    has_more: bool
    next: str | None


def page_of(kind: type[Data], page: Page[Row]) -> PageOf[Data]:
    """A page of rows as the API answers it."""
    return PageOf(data=[kind.model_validate(row) for row in page.rows], has_more=page.has_more, next=page.next)
