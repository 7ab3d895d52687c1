"""Regions, the latencies between them, and GPU types."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from fastapi import Body as BodyParam
from pydantic import Field

from controlplane.api.admin.changes import fleet_change
from controlplane.api.admin.fields import (
    After,
    GpuTypePath,
    Limit,
    OwnedAnswer,
    Owner,
    PageOf,
    RegionPath,
    page_of,
)
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep
from controlplane.declarations import (
    GpuTypeChange,
    RegionChange,
    RegionLatency,
)
from controlplane.store import fleet, tables
from controlplane.store.rows import list_rows, require

router = APIRouter(tags=["admin: fleet"], route_class=IdempotentRoute)


class Region(OwnedAnswer):
    """A region."""

    name: str = Field(examples=["us-east"])
    position: int = Field(examples=[0])
    created_at: datetime


class GpuType(OwnedAnswer):
    """A GPU type."""

    name: str = Field(examples=["H800"])
    memory_bytes: int = Field(examples=[85_899_345_920])
    cost_per_hour: float = Field(examples=[2.5])
    created_at: datetime


class OwnedLatency(RegionLatency):
    """How far one region is from another, and what said so."""

    owner: str | None = Field(description="the fleet's file that made it; null: it was made by hand")


@router.put("/regions/{name}", summary="Register a region, or move it")
def put_region(
    name: RegionPath,
    session: SessionDep,
    caller: Operator,
    change: Annotated[RegionChange, BodyParam(default_factory=RegionChange)],
    owner: Owner = None,
) -> Region:
    """Traffic that cannot stay in its own region tries the others by rising `position`."""
    with fleet_change(session, caller, "region.put", tables.Region, name, owner=owner):
        row = fleet.put_region(session, name=name, position=change.position)
    return Region.model_validate(row)


@router.get("/regions", summary="List regions")
def list_regions(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[Region]:
    """Regions by name."""
    return page_of(Region, list_rows(session, tables.Region, after=after, limit=limit))


@router.get("/regions/{name}", summary="One region")
def get_region(name: RegionPath, session: SessionDep, _: Viewer) -> Region:
    """A region."""
    return Region.model_validate(require(session, tables.Region, name, param="region"))


@router.put("/region-latencies", summary="Say how far a region is from another")
def put_latency(latency: RegionLatency, session: SessionDep, caller: Operator, owner: Owner = None) -> OwnedLatency:
    """Traffic that cannot stay in its own region tries the nearest other first; one of unknown latency comes last."""
    key = (latency.origin, latency.destination)
    with fleet_change(session, caller, "region_latency.put", tables.RegionLatency, key, owner=owner):
        row = fleet.put_latency(session, **latency.model_dump())
    return OwnedLatency.model_validate(row)


@router.get("/region-latencies", summary="List latencies between regions")
def list_latencies(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[OwnedLatency]:
    """Latencies by origin and destination."""
    return page_of(OwnedLatency, list_rows(session, tables.RegionLatency, after=after, limit=limit))


@router.put("/gpu-types/{name}", summary="Register a GPU type, or change what it costs")
def put_gpu_type(
    name: GpuTypePath, change: GpuTypeChange, session: SessionDep, caller: Operator, owner: Owner = None
) -> GpuType:
    """A GPU type; nodes name it when they join."""
    with fleet_change(session, caller, "gpu_type.put", tables.GpuType, name, owner=owner):
        row = fleet.put_gpu_type(session, name=name, **change.model_dump())
    return GpuType.model_validate(row)


@router.get("/gpu-types", summary="List GPU types")
def list_gpu_types(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[GpuType]:
    """GPU types by name."""
    return page_of(GpuType, list_rows(session, tables.GpuType, after=after, limit=limit))


@router.get("/gpu-types/{name}", summary="One GPU type")
def get_gpu_type(name: GpuTypePath, session: SessionDep, _: Viewer) -> GpuType:
    """A GPU type."""
    return GpuType.model_validate(require(session, tables.GpuType, name, param="gpu_type"))
