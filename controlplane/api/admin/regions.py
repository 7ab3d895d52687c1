"""Regions, the latencies between them, and GPU types."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from fastapi import Body as BodyParam
from pydantic import Field

from controlplane.api.admin.changes import put_row
from controlplane.api.admin.fields import (
    After,
    Answer,
    Body,
    Count,
    GpuTypePath,
    Limit,
    Number,
    PageOf,
    PositiveInt,
    RegionName,
    RegionPath,
    page_of,
    pair_of,
)
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep
from controlplane.store import fleet, latencies, tables

router = APIRouter(tags=["admin: fleet"], route_class=IdempotentRoute)


class RegionChange(Body):
    """Where a region stands in the order of preference."""

    position: Count | None = Field(None, description="lower is preferred; a new region without one goes last")


class Region(Answer):
    """A region."""

    name: str = Field(examples=["us-east"])
    position: int = Field(examples=[0])
    created_at: datetime


class RegionLatency(Answer, Body):
    """How far one region is from another."""

    origin: RegionName
    destination: RegionName = Field(examples=["us-west"])
    ms: Number = Field(description="milliseconds there and back", examples=[62.0], le=60_000)


class GpuTypeChange(Body):
    """What a GPU type has and costs."""

    memory_bytes: PositiveInt = Field(description="memory of one GPU", examples=[85_899_345_920])
    cost_per_hour: Number = Field(description="of one GPU, in your currency", examples=[2.5])


class GpuType(Answer):
    """A GPU type."""

    name: str = Field(examples=["H800"])
    memory_bytes: int = Field(examples=[85_899_345_920])
    cost_per_hour: float = Field(examples=[2.5])
    created_at: datetime


@router.put("/regions/{name}", summary="Register a region, or move it")
def put_region(
    name: RegionPath,
    session: SessionDep,
    caller: Operator,
    change: Annotated[RegionChange, BodyParam(default_factory=RegionChange)],
) -> Region:
    """Traffic that cannot stay in its own region tries the others by rising `position`."""
    row = put_row(
        session,
        caller,
        table=tables.Region,
        key=name,
        action="region.put",
        values={} if change.position is None else {"position": change.position},
        write=lambda: fleet.put_region(session, name=name, position=change.position),
    )
    return Region.model_validate(row)


@router.get("/regions", summary="List regions")
def list_regions(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[Region]:
    """Regions by name."""
    return page_of(Region, fleet.list_page(session, tables.Region, after=after, limit=limit), lambda row: row.name)


@router.get("/regions/{name}", summary="One region")
def get_region(name: RegionPath, session: SessionDep, _: Viewer) -> Region:
    """A region."""
    return Region.model_validate(fleet.require(session, tables.Region, name, param="region"))


@router.put("/region-latencies", summary="Say how far a region is from another")
def put_latency(latency: RegionLatency, session: SessionDep, caller: Operator) -> RegionLatency:
    """Traffic that cannot stay in its own region tries the nearest other first; one of unknown latency comes last."""
    values = latency.model_dump()
    row = put_row(
        session,
        caller,
        table=tables.RegionLatency,
        key=(latency.origin, latency.destination),
        action="region_latency.put",
        values=values,
        write=lambda: latencies.put_latency(session, **values),
    )
    return RegionLatency.model_validate(row)


@router.get("/region-latencies", summary="List latencies between regions")
def list_latencies(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[RegionLatency]:
    """Latencies by origin and destination."""
    page = latencies.list_latencies(session, after=pair_of(after), limit=limit)
    return page_of(RegionLatency, page, lambda row: f"{row.origin}|{row.destination}")


@router.put("/gpu-types/{name}", summary="Register a GPU type, or change what it costs")
def put_gpu_type(name: GpuTypePath, change: GpuTypeChange, session: SessionDep, caller: Operator) -> GpuType:
    """A GPU type; nodes name it when they join."""
    values = change.model_dump()
    row = put_row(
        session,
        caller,
        table=tables.GpuType,
        key=name,
        action="gpu_type.put",
        values=values,
        write=lambda: fleet.put_gpu_type(session, name=name, **values),
    )
    return GpuType.model_validate(row)


@router.get("/gpu-types", summary="List GPU types")
def list_gpu_types(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[GpuType]:
    """GPU types by name."""
    return page_of(GpuType, fleet.list_page(session, tables.GpuType, after=after, limit=limit), lambda row: row.name)


@router.get("/gpu-types/{name}", summary="One GPU type")
def get_gpu_type(name: GpuTypePath, session: SessionDep, _: Viewer) -> GpuType:
    """A GPU type."""
    return GpuType.model_validate(fleet.require(session, tables.GpuType, name, param="gpu_type"))
