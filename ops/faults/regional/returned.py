"""Whether a region that was lost is back: its server follows, its gateway serves, and its nodes obey the new term."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2 as httpx

from ops.faults.load import body_of
from ops.faults.regional.stack import BorderedStack
from ops.local.waiting import wait_until

BACK_WITHIN_S = 120.0
_TERM = "tidepool_node_term"


class Returned:
    """A region that was lost with the primary, and the gateway of another."""

    def __init__(self, stack: BorderedStack, region: str, other: str) -> None:
        self._stack = stack
        self._regional = stack.regional
        self._region = region
        self._other = other

    async def findings(self) -> list[str]:
        """What is not as it was before the loss, after two minutes at most for each."""
        checks: dict[str, Callable[[], Awaitable[str]]] = {
            "its server does not follow the primary": self._not_following,
            "its gateway is not well": self._unwell,
            "its gateway does not answer": self._unanswered,
            "its nodes do not obey the newest term": self._disobedient,
        }
        found = await asyncio.gather(*(_lasting(check) for check in checks.values()))
        return [
            f"{self._region}: {what} {BACK_WITHIN_S:g} s after the drill: {why}"
            for what, why in zip(checks, found, strict=True)
            if why
        ]

    async def _not_following(self) -> str:
        """Why its server is none that follows a primary elsewhere; empty: it is one."""
        primary = await asyncio.to_thread(self._regional.cluster.primary)
        if primary not in {None, self._region}:
            return ""
        return "it is the primary" if primary else "there is no primary with all others behind it"

    async def _unwell(self) -> str:
        """What the region's gateway says that it lacks; empty: nothing."""
        async with httpx.AsyncClient(base_url=self._regional.urls()[self._region], trust_env=False) as client:
            health = (await client.get("/readyz")).json()
        lacks = [*health["missing"], *health["away"], *health["behind"]]
        return ", ".join(lacks)

    async def _unanswered(self) -> str:
        """How the region's gateway refuses a request for one of the models; empty: it answers."""
        headers = {"Authorization": f"Bearer {self._regional.keys['client']}"}
        async with httpx.AsyncClient(
            base_url=self._regional.urls()[self._region], headers=headers, timeout=30, trust_env=False
        ) as client:
            body = body_of(self._stack.fleet.model_names()[0], 0, 2)
            answer = await client.post("/v1/chat/completions", json=body)
        return "" if answer.is_success else f"{answer.status_code} {answer.text[:200]}"

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
