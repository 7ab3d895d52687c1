"""Pins (replica overrides): an operator fixes an endpoint's number of instances until a time."""

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query
from pydantic import Field

from controlplane.api.admin.fields import After, Limit, OwnedAnswer, Owner, PageOf, PinPath, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import NewPin
from controlplane.errors import InvalidValueError
from controlplane.planner.schedule import enqueue
from controlplane.policies.facts import Endpoint
from controlplane.store import overrides
from controlplane.store.keys import record, snapshot

router = APIRouter(tags=["admin: plans"], route_class=IdempotentRoute)


class Pin(OwnedAnswer):
    """A pin. It is in force until `until`, or `removed_at` where that is set."""

    id: str = Field(examples=["pin_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    model: str
    region: str
    instances: int
    until: datetime
    note: str
    created_by: str
    created_at: datetime
    removed_at: datetime | None


@router.post("/pins", summary="Pin an endpoint", status_code=201)
def create_pin(
    body: NewPin,
    session: SessionDep,
    state: StateDep,
    caller: Operator,
    after_commit: BackgroundTasks,
    owner: Owner = None,
) -> Pin:
    """Scaling follows within seconds, and every plan from the next one on; plans made without the pin are stale. An
    endpoint that is pinned already is refused (409): remove that pin first.
    """
    _check_until(body.until, days_max=state.settings.pin_days_max)
    pin = overrides.add_override(
        session,
        endpoint=Endpoint(model=body.model, region=body.region),
        instances=body.instances,
        until=body.until,
        note=body.note,
        created_by=caller.name,
        owner=owner,
    )
    record(session, actor=caller.name, action="pin.create", subject=pin.id, after=snapshot(pin))
    after_commit.add_task(enqueue, "scale")
    return Pin.model_validate(pin)


@router.get("/pins", summary="List pins")
def list_pins(
    session: SessionDep,
    _: Viewer,
    live_only: Annotated[bool, Query(description="leave out those that have ended")] = True,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[Pin]:
    """Pins, the oldest first."""
    return page_of(Pin, overrides.list_overrides(session, after=after, limit=limit, live_only=live_only))


@router.get("/pins/{pin_id}", summary="A pin")
def get_pin(pin_id: PinPath, session: SessionDep, _: Viewer) -> Pin:
    """A pin, ended or not."""
    return Pin.model_validate(overrides.get_override(session, pin_id))


@router.delete("/pins/{pin_id}", summary="End a pin now")
def remove_pin(pin_id: PinPath, session: SessionDep, caller: Operator, after_commit: BackgroundTasks) -> Pin:
    """The endpoint follows the plan and its limits again. Ending a pin that has ended changes nothing."""
    before = snapshot(overrides.get_override(session, pin_id))
    pin = overrides.remove_override(session, pin_id)
    if before["removed_at"] is None:
        record(session, actor=caller.name, action="pin.remove", subject=pin_id, before=before, after=snapshot(pin))
        after_commit.add_task(enqueue, "scale")
    return Pin.model_validate(pin)


def _check_until(until: datetime, *, days_max: int) -> None:
    now = datetime.fromtimestamp(time.time(), UTC)
    if until <= now:
        raise InvalidValueError(f"until: {until.isoformat()} is not in the future", param="until")
    if until > now + timedelta(days=days_max):
        raise InvalidValueError(
            f"until: {until.isoformat()} is more than {days_max} days away; limits for good belong to the endpoint",
            param="until",
        )
