"""Callers of tenants with a limit, who ask for more than that in every region at once; and what was admitted."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx2 as httpx

from ops.client.api import open_api
from ops.faults.load import body_of
from ops.local.regional_stack import RegionalStack

LIMITED, BUDGETED = "limited", "budgeted"
REQUESTS_PER_MINUTE = 60
TOKENS_TOTAL = 600
EVERY_S = 0.25
ANSWERED_WITHIN_S = 20.0
_MINUTE_S = 60.0
_OUTPUT_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A request that was answered. Times are on `time.monotonic`; `tokens`: of prompt and answer."""

    started_s: float
    ended_s: float
    tokens: int


@dataclass(kw_only=True)
class Caller:
    """Asks one region's gateway, four times a second, with the key of a tenant."""

    tenant: str
    region: str
    url: str
    key: str
    model: str
    admitted: list[Admitted] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    async def run(self, until: asyncio.Event) -> None:
        """Ask until the event."""
        async with httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=ANSWERED_WITHIN_S,
            trust_env=False,
        ) as client:
            while not until.is_set():
                await self._ask(client)
                with suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), EVERY_S)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        started_s = time.monotonic()
        try:
            answer = await client.post("/v1/chat/completions", json=body_of(self.model, 0, _OUTPUT_TOKENS))
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            self.refused[str(error.response.status_code)] += 1
        except httpx.HTTPError as error:
            self.refused[type(error).__name__] += 1
        else:
            tokens = answer.json()["usage"]["total_tokens"]
            self.admitted.append(Admitted(started_s=started_s, ended_s=time.monotonic(), tokens=tokens))


def make_callers(stack: RegionalStack, model: str) -> list[Caller]:
    """Limit two tenants, one by requests a minute and one by tokens in all, and make them a caller in each region."""
    callers = []
    limits = {LIMITED: {"requests_per_minute": REQUESTS_PER_MINUTE}, BUDGETED: {"tokens_total": TOKENS_TOTAL}}
    with open_api(stack.url, stack.keys["admin"]) as api:
        for tenant, limit in limits.items():
            api.put(f"/admin/tenants/{tenant}", limit)
            secret = api.post("/admin/keys", {"name": f"drill-{tenant}", "role": "client", "tenant": tenant})["secret"]
            for region, url in stack.urls().items():
                callers.append(Caller(tenant=tenant, region=region, url=url, key=secret, model=model))
    return callers


def limit_findings(callers: Sequence[Caller]) -> list[str]:
    """What all regions together admitted beyond what one bucket of the limit would, or spent beyond the budget."""
    limited = [one for caller in callers if caller.tenant == LIMITED for one in caller.admitted]
    spent = sum(one.tokens for caller in callers if caller.tenant == BUDGETED for one in caller.admitted)
    findings = []
    if (excess := excess_of(limited, REQUESTS_PER_MINUTE)) > 0:
        findings.append(f"{excess:.1f} requests more than {REQUESTS_PER_MINUTE} a minute were admitted")
    if spent > TOKENS_TOTAL:
        findings.append(f"{spent} tokens were spent of a budget of {TOKENS_TOTAL}")
    return findings


def excess_of(admitted: Sequence[Admitted], per_minute: int) -> float:
    """By how many requests the fullest stretch of time exceeds what a bucket of the limit would admit in it; 0: none.

    A request was admitted at some moment between its start and its end, so a stretch lasts from the earliest start to
    the latest end of what is counted in it.
    """
    ordered = sorted(admitted, key=lambda one: one.ended_s)
    worst = 0.0
    for first in ordered:
        inside = [one for one in ordered if one.started_s >= first.started_s]
        for count, last in enumerate(inside, start=1):
            allowed = per_minute * (1 + (last.ended_s - first.started_s) / _MINUTE_S)
            worst = max(worst, count - allowed)
    return round(worst, 6)
