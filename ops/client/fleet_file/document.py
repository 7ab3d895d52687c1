"""What a fleet's file may say. Bodies of the admin API, nested by name, with their limits."""

from pydantic import Field, model_validator

from controlplane.declarations import (
    AliasChange,
    Body,
    GpuTypeChange,
    GpuTypeName,
    InstanceLimits,
    Milliseconds,
    ModelChange,
    ModelName,
    Override,
    OwnerName,
    RegionChange,
    RegionName,
    Tenant,
    TenantChange,
    Throughput,
)


class DeclaredEndpoint(InstanceLimits):
    """A model in a region."""

    pin: Override | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "DeclaredEndpoint":
        if self.instances_min > self.instances_max:
            raise ValueError(f"instances_min {self.instances_min} is above instances_max {self.instances_max}")
        return self


class DeclaredModel(ModelChange):
    """A model, what it does on GPU types, and the regions that offer it."""

    profiles: dict[GpuTypeName, Throughput] = Field(default_factory=dict)
    endpoints: dict[RegionName, DeclaredEndpoint] = Field(default_factory=dict)


class FleetFile(Body):
    """A fleet and its tenants, and under which name the file owns what it makes."""

    owner: OwnerName | None = None
    regions: dict[RegionName, RegionChange] = Field(default_factory=dict)
    latencies: dict[RegionName, dict[RegionName, Milliseconds]] = Field(default_factory=dict)
    gpu_types: dict[GpuTypeName, GpuTypeChange] = Field(default_factory=dict)
    models: dict[ModelName, DeclaredModel] = Field(default_factory=dict)
    aliases: dict[ModelName, AliasChange] = Field(default_factory=dict)
    tenants: dict[Tenant, TenantChange] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _between_two(self) -> "FleetFile":
        for origin, others in self.latencies.items():
            if origin in others:
                raise ValueError(f"latencies.{origin}.{origin}: a region has no latency to itself")
        return self
