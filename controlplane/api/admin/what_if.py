"""What-if runs: simulations of the running fleet with changes. A worker simulates; the API keeps and shows."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks
from pydantic import Field

from controlplane.api.admin.fields import After, Answer, Limit, PageOf, RunPath, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import Body
from controlplane.planner.schedule import enqueue
from controlplane.planner.what_if.changes import HOURS_MAX, WhatIfChanges, check_changes
from controlplane.store import what_if
from controlplane.store.keys import record
from controlplane.store.what_if import WhatIfRun, WhatIfState

router = APIRouter(tags=["admin: plans"], route_class=IdempotentRoute)


class NewWhatIf(Body):
    """What to simulate: the fleet as it runs now, with changes, and its last hours of demand once more."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$", examples=["half of EU"])]
    hours: int = Field(24, strict=True, ge=1, le=HOURS_MAX, description="the last hours of demand, which come again")
    changes: WhatIfChanges = Field(default_factory=WhatIfChanges)


class WhatIf(Answer):
    """A run. `progress`: the share of its time that is simulated."""

    id: str = Field(examples=["whatif_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    name: str
    created_by: str
    hours: int
    changes: WhatIfChanges
    state: WhatIfState
    progress: float
    error: str | None
    event_log_hash: str | None = Field(description="equal hashes: the same events")
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class WhatIfWhole(WhatIf):
    """A run with its figures, named as `tidepool simulate --json` names them."""

    result: dict[str, Any] | None = Field(description="null: it is not completed")


@router.post("/what-if", summary="Simulate the fleet with changes", status_code=201)
def create_run(
    body: NewWhatIf, session: SessionDep, state: StateDep, caller: Operator, after_commit: BackgroundTasks
) -> WhatIf:
    """A forecaster simulates it, at most `what_if_running_max` at once; the others wait in their order."""
    check_changes(session, body.changes, hours=body.hours)
    run = what_if.add_run(
        session,
        name=body.name,
        created_by=caller.name,
        hours=body.hours,
        changes=body.changes.model_dump(mode="json"),
        queued_max=state.settings.what_if_queued_max,
    )
    record(session, actor=caller.name, action="what_if.create", subject=run.id, after=_brief(run))
    after_commit.add_task(enqueue, "what_if")
    return WhatIf.model_validate(run)


@router.get("/what-if", summary="List what-if runs")
def list_runs(
    session: SessionDep, _: Viewer, state: WhatIfState | None = None, limit: Limit = 20, after: After = None
) -> PageOf[WhatIf]:
    """The newest first, without their figures."""
    return page_of(WhatIf, what_if.list_runs(session, state=state, after=after, limit=limit))


@router.get("/what-if/{run_id}", summary="A what-if run with its figures")
def get_run(run_id: RunPath, session: SessionDep, _: Viewer) -> WhatIfWhole:
    """A run, ended or not."""
    return WhatIfWhole.model_validate(what_if.get_run(session, run_id))


@router.post("/what-if/{run_id}/cancel", summary="Cancel a what-if run")
def cancel_run(run_id: RunPath, session: SessionDep, caller: Operator) -> WhatIf:
    """Its simulation ends within seconds. Cancelling a run that has ended changes nothing."""
    before = _brief(what_if.get_run(session, run_id))
    run = what_if.cancel_run(session, run_id)
    if _brief(run) != before:
        record(session, actor=caller.name, action="what_if.cancel", subject=run_id, before=before, after=_brief(run))
    return WhatIf.model_validate(run)


@router.delete("/what-if/{run_id}", summary="Delete a what-if run")
def delete_run(run_id: RunPath, session: SessionDep, caller: Operator) -> WhatIf:
    """With its figures; the answer is the run as it was. 409 for one that has not ended: cancel it first."""
    run = what_if.get_run(session, run_id)
    gone, before = WhatIf.model_validate(run), _brief(run)
    what_if.delete_run(session, run_id)
    record(session, actor=caller.name, action="what_if.delete", subject=run_id, before=before)
    return gone


def _brief(run: WhatIfRun) -> dict[str, Any]:
    """Of a run, for the audit."""
    return {"name": run.name, "hours": run.hours, "changes": run.changes, "state": run.state}
