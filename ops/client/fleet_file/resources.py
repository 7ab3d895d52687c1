"""Kinds of things in a fleet's file, each by its key, as the admin API has it and as the file declares it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from controlplane.declarations import (
    AliasChange,
    Body,
    EndpointChange,
    GpuTypeChange,
    ModelChange,
    NewPin,
    Profile,
    RegionChange,
    RegionLatency,
    TenantChange,
)
from ops.client.api import Api
from ops.client.fleet_file.document import FleetFile

Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind: where the API lists it, the fields that are its key, and its body."""

    name: str
    path: str
    keys: tuple[str, ...]
    body: type[Body]

    @property
    def fields(self) -> tuple[str, ...]:
        """Those that are no part of the key."""
        return tuple(field for field in self.body.model_fields if field not in self.keys)


REGION = Kind(name="region", path="/admin/regions", keys=("name",), body=RegionChange)
LATENCY = Kind(name="latency", path="/admin/region-latencies", keys=("origin", "destination"), body=RegionLatency)
GPU_TYPE = Kind(name="GPU type", path="/admin/gpu-types", keys=("name",), body=GpuTypeChange)
MODEL = Kind(name="model", path="/admin/models", keys=("name",), body=ModelChange)
PROFILE = Kind(name="profile", path="/admin/profiles", keys=("model", "gpu_type"), body=Profile)
ENDPOINT = Kind(name="endpoint", path="/admin/endpoints", keys=("model", "region"), body=EndpointChange)
ALIAS = Kind(name="alias", path="/admin/aliases", keys=("name",), body=AliasChange)
PIN = Kind(name="pin", path="/admin/pins", keys=("model", "region"), body=NewPin)
TENANT = Kind(name="tenant", path="/admin/tenants", keys=("name",), body=TenantChange)
KINDS = (REGION, LATENCY, GPU_TYPE, MODEL, PROFILE, ENDPOINT, ALIAS, PIN, TENANT)
"""In the order in which they are made: each needs some before it only."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One thing. `id`: a pin's; the others have their key. `owner`: of the file that made it; None: it was made by
    hand.
    """

    kind: Kind
    key: Key
    fields: dict[str, Any]
    id: str | None = None
    owner: str | None = None

    @property
    def title(self) -> str:
        return f"{self.kind.name} {' / '.join(self.key)}"


Resources = dict[tuple[str, Key], Resource]
"""By the name of their kind and their key."""


def read_resources(api: Api) -> Resources:
    """All that is there."""
    return _by_key(
        Resource(
            kind=kind,
            key=tuple(row[key] for key in kind.keys),
            fields={field: row[field] for field in kind.fields},
            id=row.get("id"),
            owner=row.get("owner"),
        )
        for kind in KINDS
        for row in api.pages(kind.path)["data"]
    )


def declared_resources(file: FleetFile, *, now: datetime) -> Resources:
    """All that a file declares. A pin that has ended is none: it would be refused, and changes nothing."""
    return _by_key(_declared(file, now))


def _declared(file: FleetFile, now: datetime) -> Iterator[Resource]:
    for name, region in file.regions.items():
        yield Resource(kind=REGION, key=(name,), fields=region.model_dump(exclude_none=True))
    for origin, others in file.latencies.items():
        for destination, ms in others.items():
            yield Resource(kind=LATENCY, key=(origin, destination), fields={"ms": ms})
    for name, gpu_type in file.gpu_types.items():
        yield Resource(kind=GPU_TYPE, key=(name,), fields=gpu_type.model_dump())
    for name, model in file.models.items():
        own = model.model_dump(exclude={"profiles", "endpoints"})
        yield Resource(kind=MODEL, key=(name,), fields=own)
        for gpu_type_name, profile in model.profiles.items():
            yield Resource(kind=PROFILE, key=(name, gpu_type_name), fields=profile.model_dump())
        for region_name, endpoint in model.endpoints.items():
            key = (name, region_name)
            yield Resource(kind=ENDPOINT, key=key, fields=endpoint.model_dump(exclude={"pin"}))
            if endpoint.pin is not None and endpoint.pin.until > now:
                until = endpoint.pin.until.astimezone(UTC)
                pin = endpoint.pin.model_copy(update={"until": until}).model_dump(mode="json")
                yield Resource(kind=PIN, key=key, fields=pin)
    for name, alias in file.aliases.items():
        yield Resource(kind=ALIAS, key=(name,), fields=alias.model_dump())
    for name, tenant in file.tenants.items():
        yield Resource(kind=TENANT, key=(name,), fields=tenant.model_dump())


def _by_key(resources: Iterator[Resource]) -> Resources:
    return {(each.kind.name, each.key): each for each in resources}
