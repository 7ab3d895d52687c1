"""Endpoints and regions for tests of the reserve."""

from typing import Any

from controlplane.policies.facts import EndpointGpu
from controlplane.policies.placement.pools import PoolLoad
from controlplane.policies.placement.reserve_facts import ReserveEndpoint, ReserveFacts, ReservePlace

LOAD = PoolLoad(  # nothing beside theta: a pool takes x / theta GPUs for x tokens/s
    prefill_base_s=0.0,
    prefill_per_token_s=1e-6,
    decode_base_s=0.0,
    decode_per_context_token_s=0.0,
    requests_per_s=0.0,
    input_tokens=1000.0,
    output_tokens=100.0,
    switch_s=0.0,
)
THETA = 1000.0


def key(model: str, region: str = "east") -> EndpointGpu:
    return EndpointGpu(model=model, region=region, gpu_type="H800")


def endpoint(model: str, median: float, upper: float, region: str = "east", **changes: Any) -> ReserveEndpoint:
    """One GPU an instance of 1,000 tokens/s."""
    values: dict[str, Any] = {"tokens_per_s": THETA, "gpus": 1, "load": LOAD} | changes
    return ReserveEndpoint(key=key(model, region), median=median, upper=upper, **values)


def reserve_facts(*endpoints: ReserveEndpoint, free: int = 100, slot_gpus: int = 1) -> ReserveFacts:
    """Each region has so many GPUs, in slots of this size."""
    room = ReservePlace(slot_gpus=slot_gpus, free_gpus=free)
    return ReserveFacts(endpoints=endpoints, places={one.key.place: room for one in endpoints})
