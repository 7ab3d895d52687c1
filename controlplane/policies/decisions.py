"""The answers of policies: frozen records, which their callers apply."""

from dataclasses import dataclass

from msgspec import Struct

from controlplane.policies.facts import Endpoint


class Route(Struct, frozen=True, kw_only=True):
    """The instance that gets a request. `utilization`: of its endpoint, as a share of 1. `cached_tokens`: of its
    prompt, which the instance has likely cached.
    """

    instance_id: str
    node_id: str
    region: str
    utilization: float
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class NoRoute:
    """Why no instance can take a request now. `waits`: it is for one that is busy."""

    reason: str
    waits: bool = False


class Reroute(Struct, frozen=True, kw_only=True):
    """A waiting request, and the route that it takes instead of its first one."""

    request_id: str
    route: Route


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Admit a request."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Queue it for spare capacity."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Why a request is refused, and after how many seconds another try makes sense."""

    reason: str
    retry_after_s: int


class Release(Struct, frozen=True, kw_only=True):
    """Send an NIW request of a batch of this tenant to an instance of an endpoint; an `urgent` one whatever the
    endpoint's window is.
    """

    endpoint: Endpoint
    instance_id: str
    batch: int
    tenant: str
    urgent: bool = False
