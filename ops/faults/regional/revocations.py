"""How long a revoked key goes on to work, in its own region and in others."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import httpx2 as httpx

EVERY_S = 2.0
ASKED_EVERY_S = 0.2
GIVEN_UP_AFTER_S = 40.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """A key that was revoked at one region's gateway, and how long another one's let it in after it had said so."""

    revoked_at: str
    asked_at: str
    at_s: float
    worked_for_s: float


class Revoker:
    """Makes keys at one region's gateway, has every gateway know them, revokes them, and asks until all refuse."""

    def __init__(self, region: str, urls: Mapping[str, str], admin_key: str) -> None:
        self._region = region
        self._urls = urls
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self.found: list[Revoked] = []

    async def run(self, until: asyncio.Event) -> None:
        """Revoke one key after the other until the event."""
        number = 0
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            while not until.is_set():
                with suppress(httpx.HTTPError):
                    await self._turn(client, f"revoked-{self._region}-{number}")
                number += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), EVERY_S)

    async def _turn(self, client: httpx.AsyncClient, name: str) -> None:
        own = f"{self._urls[self._region]}/admin/keys"
        made = await client.post(own, json={"name": name, "role": "client"}, headers=self._headers)
        key = made.raise_for_status().json()
        for url in self._urls.values():
            await _is_let_in(client, url, key["secret"])
        (await client.delete(f"{own}/{key['id']}", headers=self._headers)).raise_for_status()
        at_s = time.monotonic()
        worked = await asyncio.gather(*(_works_for(client, url, key["secret"], at_s) for url in self._urls.values()))
        self.found += [
            Revoked(revoked_at=self._region, asked_at=region, at_s=at_s, worked_for_s=worked_s)
            for region, worked_s in zip(self._urls, worked, strict=True)
        ]


async def _works_for(client: httpx.AsyncClient, url: str, secret: str, at_s: float) -> float:
    """Until when a gateway lets a key in that was revoked at `at_s`: the start of the last request that it let in."""
    last_s = at_s
    while time.monotonic() < at_s + GIVEN_UP_AFTER_S:
        asked_s = time.monotonic()
        let_in = await _is_let_in(client, url, secret)
        if let_in is False:
            break
        last_s = asked_s if let_in else last_s
        await asyncio.sleep(ASKED_EVERY_S)
    return last_s - at_s


async def _is_let_in(client: httpx.AsyncClient, url: str, secret: str) -> bool | None:
    """Whether a gateway lets a key in; None: it does not say."""
    try:
        answer = await client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {secret}"})
    except httpx.HTTPError:
        return None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return False
    return True if answer.status_code == httpx.codes.OK else None
