"""Whether a region that was lost is back: its server follows, its gateway serves, and its nodes obey the new term."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2 as httpx

from controlplane.policies.failover import MemberFacts
from ops.failover.members import ask_members, members_of
from ops.faults.regional.stack import BorderedStack
from ops.local.waiting import wait_until

BACK_WITHIN_S = 60.0
_TERM = "tidepool_node_term"


class Returned:
    """A region that was lost with the primary, and the gateway of another."""

    def __init__(self, stack: BorderedStack, region: str, other: str) -> None:
        self._regional = stack.regional
        self._region = region
        self._other = other

    async def findings(self) -> list[str]:
        """What is not as it was before the loss, after a minute at most for each."""
        checks: dict[str, Callable[[], Awaitable[str]]] = {
            "its server does not follow the primary": self._not_following,
            "its gateway is not well": self._unwell,
            "its nodes do not obey the newest term": self._disobedient,
        }
        found = await asyncio.gather(*(_lasting(check) for check in checks.values()))
        return [
            f"{self._region}: {what} {BACK_WITHIN_S:g} s after the drill: {why}"
            for what, why in zip(checks, found, strict=True)
            if why
        ]

    async def _not_following(self) -> str:
        """Every server that is not part of one cluster, with one primary in another region; empty: none."""
        facts = await asyncio.to_thread(ask_members, members_of(self._regional.cluster.url(self._other)))
        return "" if follows(facts, self._region) else str(facts)

    async def _unwell(self) -> str:
        """What the region's gateway says that it lacks; empty: nothing."""
        async with httpx.AsyncClient(base_url=self._regional.urls()[self._region], trust_env=False) as client:
            health = (await client.get("/readyz")).json()
        lacks = [*health["missing"], *health["away"], *health["behind"]]
        return ", ".join(lacks)

    async def _disobedient(self) -> str:
        """The nodes of the region that have not seen the term of the primary; empty: none."""
        headers = {"Authorization": f"Bearer {self._regional.keys['admin']}"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
            url = self._regional.urls()[self._other]
            term = (await client.get(f"{url}/admin/term")).json()["term"]
            nodes = (await client.get(f"{url}/admin/nodes", params={"region": self._region, "limit": 100})).json()
            seen = {node["name"]: await _term_of(client, node["url"]) for node in nodes["data"]}
        if not seen:
            return "there is none"
        return ", ".join(f"{name} is at term {of} of {term}" for name, of in seen.items() if of != term)


def follows(facts: Sequence[MemberFacts], region: str) -> bool:
    """Whether all servers are one cluster whose primary is in another region."""
    primaries = [one.region for one in facts if one.takes_writes]
    whole = all(one.region is not None for one in facts) and len({one.timeline for one in facts}) == 1
    return whole and len(primaries) == 1 and primaries[0] != region


async def _lasting(check: Callable[[], Awaitable[str]]) -> str:
    """What a check finds still when its time is over; empty: nothing."""
    last = ""

    async def is_well() -> bool:
        nonlocal last
        try:
            last = await check()
        except httpx.HTTPError as error:
            last = type(error).__name__
        return not last

    await wait_until(is_well, BACK_WITHIN_S)
    return last


async def _term_of(client: httpx.AsyncClient, url: str) -> int | None:
    """The newest term that a node has seen; None: it does not say."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    found: Any = next((line.split()[-1] for line in lines if line.startswith(f"{_TERM} ")), None)
    return None if found is None else int(float(found))
