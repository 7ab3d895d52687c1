"""Latencies between regions, as operators set them."""

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from controlplane.errors import InvalidValueError, NotFoundError
from controlplane.store.paging import Page, page
from controlplane.store.tables import Region, RegionLatency


def put_latency(session: Session, *, origin: str, destination: str, ms: float) -> RegionLatency:
    """Say how far a region is from another. Plans do not depend on it, so the fleet's index stays.

    Raises:
        InvalidValueError: it is one region.
        NotFoundError: a region is not registered.
    """
    if origin == destination:
        raise InvalidValueError(f"destination: '{destination}' is the origin itself", param="destination")
    for param, region in (("origin", origin), ("destination", destination)):
        if session.get(Region, region) is None:
            raise NotFoundError(f"{param} '{region}' is not registered", param=param)
    return session.merge(RegionLatency(origin=origin, destination=destination, ms=ms))


def list_latencies(session: Session, *, after: tuple[str, str] | None, limit: int) -> Page[RegionLatency]:
    """One page of latencies by origin and destination."""
    order = tuple_(RegionLatency.origin, RegionLatency.destination)
    return page(session, select(RegionLatency), order, after=after, limit=limit)


def all_latencies(session: Session) -> dict[tuple[str, str], float]:
    """Milliseconds by origin and destination."""
    rows = session.execute(select(RegionLatency.origin, RegionLatency.destination, RegionLatency.ms))
    return {(origin, destination): ms for origin, destination, ms in rows}
