"""Another drill: nothing is lost, but clocks are wrong, one region's copy of the database lags and another's hangs.

The first region has the primary. The third's clocks are behind, so that its copy looks younger than it is; that one
lags. Then the second's Postgres, whose clocks are ahead, is stopped for a while.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from controlplane.database_address import libpq_url
from ops.faults.check import outcomes
from ops.faults.regional.ages import AgeWatch, Marks, Told, too_young
from ops.faults.regional.clients import ClientPlan, Clients, broken, unanswered
from ops.faults.regional.limited import BUDGETED, LIMITED, Caller, limit_findings, make_callers
from ops.faults.regional.revocations import Revoked, Revoker
from ops.faults.regional.stack import BorderedStack
from ops.local.replay_stack import Fleet, register_replayed, wait_replayed
from ops.local.waiting import wait_until

KEY_CACHE_S, LAG_MAX_S = 1.0, 5.0
ENVIRONMENT = {"TIDEPOOL_KEY_CACHE_S": f"{KEY_CACHE_S:g}", "TIDEPOOL_REPLICA_LAG_MAX_S": f"{LAG_MAX_S:g}"}
"""A key is remembered for so short a time that a read of a copy which lags too much would show."""
REVOKED_WITHIN_S = KEY_CACHE_S + LAG_MAX_S + 2.0
"""In which every region refuses a revoked key; the rest is for a loaded machine."""
REVOKED_WHILE_HANGING_S = REVOKED_WITHIN_S + LAG_MAX_S + 1.0
"""The same where a copy hangs, since what was asked of it before that is known waits for it that long."""
IN_STEP_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OutOfStepPlan:
    """The parameters. `steady_s`: with wrong clocks alone; `lagging_s`, `hanging_s`: with a copy that is `lag_s`
    behind, and with one that answers nothing; `after_s`: after each of them.
    """

    fleet: Fleet
    clients: ClientPlan = field(default_factory=ClientPlan)
    skew_s: float = 5.0
    lag_s: float = 10.0
    steady_s: float = 30.0
    lagging_s: float = 30.0
    hanging_s: float = 30.0
    after_s: float = 15.0


async def run_out_of_step(plan: OutOfStepPlan, home: Path, notify: Callable[[str], None]) -> dict[str, Any]:
    """Run in an empty home and return the report; `broken` lists promises that do not hold."""
    stack = BorderedStack(home, plan.fleet, skew_s=plan.skew_s, environment=ENVIRONMENT)
    notify(f"starting {len(stack.regional.regions)} regions; the logs are in {home / 'regions'}")
    async with stack.running():
        return await _Drill(plan, stack, notify).run()


class _Drill:
    def __init__(self, plan: OutOfStepPlan, stack: BorderedStack, notify: Callable[[str], None]) -> None:
        self._plan = plan
        self._stack = stack
        self._notify = notify
        regional = stack.regional
        self._first, self._hanging, self._lagging = regional.regions
        self._clients = Clients(regional, plan.fleet.model_names(), plan.clients)
        urls, admin = regional.urls(), regional.keys["admin"]
        self._revokers = [Revoker(region, urls, admin) for region in regional.regions]
        self._marks = Marks(regional.cluster.url(self._first))
        copies = {region: member.url() for region, member in regional.cluster.members.items() if region != self._first}
        self._ages = AgeWatch({region: urls[region] for region in copies}, copies, self._marks)
        self._callers: list[Caller] = []
        self._stop = asyncio.Event()
        self._lagged_s = self._hung_s = (0.0, 0.0)

    async def run(self) -> dict[str, Any]:
        """The report."""
        regional, clients = self._stack.regional, self._clients
        admin = regional.keys["admin"]
        await asyncio.to_thread(register_replayed, regional.url, admin, self._plan.fleet)
        await wait_replayed(regional.url, admin, self._plan.fleet)
        self._notify("every endpoint is ready; asking for the undisturbed answers")
        await clients.ask_undisturbed()
        self._callers = await asyncio.to_thread(make_callers, regional, self._plan.fleet.model_names()[0])
        in_step = await self._disturb()
        self._notify("waiting for the batches, and asking every region for what it has promised")
        found = await clients.findings(regional.url)
        found["interactive"] = [
            one for region, load in clients.loads.items() for one in unanswered(load.sent.streams, region)
        ]
        found["limits"] = limit_findings(self._callers)
        found["revocations"] = self._revocation_findings()
        found["ages"] = [*too_young(self._ages.told), *self._shown_findings()]
        found["in step"] = [] if in_step else [f"no copy is in step {IN_STEP_WITHIN_S:g} s after the last disturbance"]
        await clients.close()
        return {
            "plan": asdict(self._plan),
            "clocks": self._stack.clocks(),
            **broken(found),
            "interactive": {region: outcomes(load.sent.streams) for region, load in clients.loads.items()},
            "limits": {tenant: self._admitted(tenant) for tenant in (LIMITED, BUDGETED)},
            "revoked_keys_worked_for_s": _longest(found for one in self._revokers for found in one.found),
            "ages": {region: _oldest(self._ages.told, region) for region in (self._hanging, self._lagging)},
            **clients.figures(),
        }

    async def _disturb(self) -> bool:
        """Run load in every region, have one copy lag and another hang; whether both were in step again afterwards."""
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            self._clients.start(group, self._stop)
            runs = [*(one.run for one in self._revokers), *(one.run for one in self._callers)]
            for run in (*runs, self._marks.run, self._ages.run):
                group.create_task(run(self._stop))
            await asyncio.sleep(plan.steady_s)
            self._notify(f"the copy of {self._lagging} lags by {plan.lag_s:g} s")
            began_s = time.monotonic()
            await asyncio.to_thread(self._delay, plan.lag_s)
            await asyncio.sleep(plan.lag_s + plan.lagging_s)
            await asyncio.to_thread(self._delay, 0.0)
            self._lagged_s = (began_s, time.monotonic())
            await asyncio.sleep(plan.after_s)
            self._notify(f"the Postgres of {self._hanging} hangs")
            began_s = time.monotonic()
            self._stack.signal_postgres(self._hanging, signal.SIGSTOP)
            await asyncio.sleep(plan.hanging_s)
            self._stack.signal_postgres(self._hanging, signal.SIGCONT)
            self._hung_s = (began_s, time.monotonic())
            self._notify(f"the Postgres of {self._hanging} goes on")
            await asyncio.sleep(plan.after_s)
            in_step = await wait_until(self._is_in_step, IN_STEP_WITHIN_S)
            self._stop.set()
        return in_step

    def _delay(self, lag_s: float) -> None:
        """Have the copy replay each commit so much later. It compares its own clock with the primary's."""
        skew_s = self._stack.server_skew_s(self._lagging) - self._stack.server_skew_s(self._first)
        delay_ms = max(0, round((lag_s + skew_s) * 1e3)) if lag_s else 0
        address = libpq_url(self._stack.regional.cluster.members[self._lagging].url())
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET recovery_min_apply_delay = {delay_ms}")
            connection.execute("SELECT pg_reload_conf()")

    async def _is_in_step(self) -> bool:
        newest = {one.region: one for one in self._ages.told}
        return len(newest) == 2 and not any(one.behind or one.away for one in newest.values())

    def _revocation_findings(self) -> list[str]:
        """Keys that worked for longer than a region may take to hear of their revocation."""
        began_s, ended_s = self._hung_s
        findings = []
        for one in (found for revoker in self._revokers for found in revoker.found):
            hangs = one.asked_at == self._hanging and began_s - REVOKED_WITHIN_S < one.at_s < ended_s
            limit_s = REVOKED_WHILE_HANGING_S if hangs else REVOKED_WITHIN_S
            if one.worked_for_s > limit_s:
                findings.append(
                    f"a key that was revoked at {one.revoked_at} worked for {one.worked_for_s:.1f} s at {one.asked_at}"
                    f" (limit {limit_s:g} s)"
                )
        return findings

    def _shown_findings(self) -> list[str]:
        """A gateway says that its copy lags, how much, and that it does not answer."""
        lagging = [one for one in _between(self._ages.told, *self._lagged_s) if one.region == self._lagging]
        hanging = [one for one in _between(self._ages.told, *self._hung_s) if one.region == self._hanging]
        shown = {
            f"{self._lagging} never said that its copy is behind": any(one.behind for one in lagging),
            f"{self._lagging} never told an age of {self._plan.lag_s:g} s": any(
                one.age_s is not None and one.age_s >= self._plan.lag_s for one in lagging
            ),
            f"{self._hanging} never said that its copy is away": any(one.away for one in hanging),
        }
        return [what for what, is_shown in shown.items() if not is_shown]

    def _admitted(self, tenant: str) -> dict[str, Any]:
        """What was admitted and refused of a tenant's requests, in all regions."""
        mine = [caller for caller in self._callers if caller.tenant == tenant]
        admitted = [one for caller in mine for one in caller.admitted]
        refused = sum((caller.refused for caller in mine[1:]), mine[0].refused.copy())
        return {
            "admitted": len(admitted),
            "tokens": sum(one.tokens for one in admitted),
            "refused": dict(refused),
            "over_s": round(max(one.ended_s for one in admitted) - min(one.started_s for one in admitted), 1)
            if admitted
            else 0.0,
        }


def _between(told: Sequence[Told], began_s: float, ended_s: float) -> list[Told]:
    return [one for one in told if began_s <= one.at_s <= ended_s]


def _longest(found: Any) -> dict[str, Any]:
    """The longest time for which a revoked key worked, by the region where it was asked, and of how many."""
    by_region: dict[str, list[Revoked]] = {}
    for one in found:
        by_region.setdefault(one.asked_at, []).append(one)
    return {
        region: {"keys": len(some), "longest": round(max(one.worked_for_s for one in some), 2)}
        for region, some in by_region.items()
    }


def _oldest(told: Sequence[Told], region: str) -> dict[str, Any]:
    """The greatest ages of a region's copy, as it was told and as it was at least; and how often it was away."""
    mine = [one for one in told if one.region == region]
    return {
        "asked": len(mine),
        "told_s": max((one.age_s for one in mine if one.age_s is not None), default=None),
        "true_s": round(max((one.true_age_s for one in mine if one.true_age_s is not None), default=0.0), 1),
        "behind": sum(one.behind for one in mine),
        "away": sum(one.away for one in mine),
    }
