"""Plans that a region's gateway acknowledged as applied, and whether each came into force exactly once."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from ops.client.api import open_api

EVERY_S, AGAIN_S = 2.0, 0.2
SOLVED_WITHIN_S = 20.0
LAST_TRIES = 50
"""How many plans a planner without one that was applied drafts at most, once nobody else changes the fleet."""


@dataclass(kw_only=True)
class PlanPromises:
    """Plans of one region: those whose application was acknowledged, and why others were not."""

    region: str
    applied: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


class Planner:
    """Drafts plan after plan at one region's gateway, and applies each. Others change the fleet meanwhile, so many are
    refused as stale: on a slow machine all of them, while administrators make pins faster than a plan is solved.
    """

    def __init__(self, region: str, url: str, key: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.promises = PlanPromises(region=region)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=SOLVED_WITHIN_S,
            limits=httpx.Limits(max_keepalive_connections=0),
            transport=transport,
            trust_env=False,
        )

    async def run(self, until: asyncio.Event) -> None:
        """Plan every two seconds until the event, and sooner after a plan that was not applied. After the event, go on
        until one plan was, if none was before.
        """
        async with self._http:
            while not until.is_set():
                wait_s = EVERY_S if await self._plan() else AGAIN_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), wait_s)
            for _ in range(LAST_TRIES):
                if self.promises.applied or await self._plan():
                    break
                await asyncio.sleep(AGAIN_S)

    async def _plan(self) -> bool:
        """Whether a plan was applied."""
        try:
            plan = (await self._post("/admin/plans", {}))["plan"]
            await self._post(f"/admin/plans/{plan['id']}/apply", {"index": plan["fleet_index"]})
        except httpx.HTTPStatusError as error:
            self.promises.refused[str(error.response.status_code)] += 1
        except httpx.HTTPError as error:
            self.promises.refused[type(error).__name__] += 1
        else:
            self.promises.applied.append(plan["id"])
            return True
        return False

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(path, json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def plan_findings(all_promises: Iterable[PlanPromises], plans: list[Any], audit: list[Any]) -> list[str]:
    """Acknowledged plans that never were in force, or more than once. `plans`, `audit`: as the admin API lists them.

    Each plan names the one that it replaced, so those that were in force are a chain from the present one back.
    """
    known = {plan["id"]: plan for plan in plans}
    present = [plan["id"] for plan in plans if plan["state"] == "applied"]
    findings = [f"{len(present)} plans are in force: {present}"] if len(present) > 1 else []
    chain, at = Counter[str](), present[0] if present else None
    while at is not None and not chain[at]:
        chain[at] += 1
        at = known[at]["previous_plan_id"] if at in known else None
    if at is not None:
        findings.append(f"plan {at} is its own predecessor")
    times = Counter(event["subject"] for event in audit if (event["before"] or {}).get("state") != "applied")
    for promises in all_promises:
        for plan_id in promises.applied:
            what = f"plan {plan_id}, acknowledged by {promises.region},"
            if plan_id not in chain:
                findings.append(f"{what} is none of those that were in force")
            if times[plan_id] != 1:
                findings.append(f"{what} was applied {times[plan_id]} times")
    return findings


def ask_plan_findings(all_promises: Iterable[PlanPromises], url: str, admin_key: str) -> list[str]:
    """The same, with what a gateway lists."""
    with open_api(url, admin_key) as api:
        plans = api.pages("/admin/plans")["data"]
        events = api.pages("/admin/audit", kind="plan")["data"]
    return plan_findings(all_promises, plans, [event for event in events if event["action"] == "plan.apply"])
