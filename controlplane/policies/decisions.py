"""What policies answer: frozen records. Applying them is somebody else's work."""

from dataclasses import dataclass

from controlplane.policies.facts import Endpoint


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a request goes. `utilization` is the chosen endpoint's, as a share of 1."""

    instance_id: str
    node_id: str
    region: str
    utilization: float


@dataclass(frozen=True, kw_only=True)
class NoRoute:
    """Why a request cannot be placed now."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Release:
    """Let `count` NIW requests of a model go to an endpoint."""

    endpoint: Endpoint
    count: int
