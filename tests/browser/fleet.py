"""What tests of the console put into the fleet without the console: plans that wait, and demand."""

import time
from collections.abc import Iterable, Mapping
from contextlib import closing

from pydantic import SecretStr

from controlplane.settings import Settings
from controlplane.store.fleet import fleet_index
from controlplane.store.plans import add_plan
from controlplane.store.session import Database, make_engine
from ops.client.api import Api
from ops.local.stack import LocalStack
from tests.controlplane.world import a_plan

HOUR_S = 3600


def waiting_plan(stack: LocalStack, cells: Iterable[tuple[str, str, int]], *, hours_later: int) -> str:
    """A plan of the schedule that waits for an operator: so many instances of a model in a region. One a window."""
    plan_id = _offer(stack, cells, hours_later=hours_later)
    assert plan_id is not None, f"the schedule has a plan of the hour {hours_later} hours from now already"
    return plan_id


def keep_schedule_out(stack: LocalStack, admin: Api) -> None:
    """No plan of the schedule comes between what a test drafts and what it applies, whatever the minute: the plans of
    this hour and the next two are rejected, so that the schedule makes no other ones.
    """
    for hours_later in range(3):
        plan_id = _offer(stack, (), hours_later=hours_later)
        if plan_id is not None:
            admin.post(f"/admin/plans/{plan_id}/reject", {"note": "plans are the tests' own"})


def _offer(stack: LocalStack, cells: Iterable[tuple[str, str, int]], *, hours_later: int) -> str | None:
    """The plan's id; None where the schedule has made that hour's plan already."""
    window_start_s = (int(time.time()) // HOUR_S + hours_later) * HOUR_S
    engine = make_engine(Settings(database_url=SecretStr(stack.database_url)))
    with closing(Database(engine)) as database, database.transaction() as session:
        plan, entries = a_plan(
            fleet_index(session),
            tuple(cells),
            origin="schedule",
            created_by="schedule",
            window_start_s=window_start_s,
            approval_reason="moves 9 GPUs, the limit is 8",
        )
        return plan.id if add_plan(session, plan, entries) else None


def import_demand(admin: Api, rates: Mapping[tuple[str, str], float], *, hours: int) -> None:
    """The last hours' demand: input tokens per second, by region and model."""
    now_s = int(time.time()) // 60 * 60
    rows = (
        f"{now_s - minute * 60},{region},{model},{rate:g}"
        for minute in range(hours * 60, 0, -1)
        for (region, model), rate in rates.items()
    )
    content = "\n".join(("start_s,region,model,tokens_per_s", *rows)) + "\n"
    admin.send("POST", "/admin/demand", content=content, headers={"Content-Type": "text/csv"})
