"""What a region's gateway acknowledged to an administrator, and whether it holds: keys, revocations and pins."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2 as httpx

from ops.client.api import open_api

EVERY_S = 0.5
ANSWERS_WITHIN_S = 8.0
HOLDS_WITHIN_S = 30.0


@dataclass(kw_only=True)
class Promises:
    """The calls of one region: keys with their secrets and pins by their notes that must be there, and those that must
    not; a name in neither had an answer that was lost. `acknowledged_s`: when calls succeeded, on `time.monotonic`.
    """

    region: str
    keys: dict[str, str] = field(default_factory=dict)
    revoked: dict[str, str] = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    unpinned: set[str] = field(default_factory=set)
    acknowledged_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


class Administrator:
    """Makes keys, revokes every other one, and makes and deletes pins at one region's gateway. Only deletions of pins
    are made again: a key whose revocation had no answer is promised neither to work nor to be refused.
    """

    def __init__(
        self, region: str, url: str, key: str, model: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.promises = Promises(region=region)
        self._model = model
        self._pin: tuple[str, str] | None = None
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=ANSWERS_WITHIN_S,
            limits=httpx.Limits(max_keepalive_connections=0),
            transport=transport,
            trust_env=False,
        )

    async def run(self, until: asyncio.Event) -> None:
        """Call every half second until the event."""
        number = 0
        async with self._http:
            while not until.is_set():
                await self._turn(f"{self.promises.region}-{number}", number)
                number += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), EVERY_S)

    async def _turn(self, name: str, number: int) -> None:
        kept = self.promises
        if (made := await self._call("POST", "/admin/keys", json={"name": name, "role": "client"})) is None:
            return
        if number % 2 == 0:
            kept.keys[name] = made["secret"]
        elif await self._call("DELETE", f"/admin/keys/{made['id']}") is not None:
            kept.revoked[name] = made["secret"]
        if self._pin is None or await self._unpin(*self._pin):
            await self._make_pin(name)

    async def _make_pin(self, name: str) -> None:
        kept = self.promises
        until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        about = {"model": self._model, "region": kept.region, "instances": 1, "until": until, "note": name}
        if (pinned := await self._call("POST", "/admin/pins", json=about)) is None:
            return
        kept.pins.add(name)
        await self._unpin(pinned["id"], name)

    async def _unpin(self, pin_id: str, name: str) -> bool:
        """Delete a pin; one whose deletion had no answer is deleted again at the next turn."""
        self._pin = pin_id, name
        self.promises.pins.discard(name)
        if await self._call("DELETE", f"/admin/pins/{pin_id}", gone_is_good=True) is None:
            return False
        self._pin = None
        self.promises.unpinned.add(name)
        return True

    async def _call(
        self, method: str, path: str, *, gone_is_good: bool = False, **request: Any
    ) -> dict[str, Any] | None:
        """The answer; None where it was refused, or is not known. `gone_is_good`: 404 is a success."""
        try:
            answer = await self._http.request(method, path, **request)
            if gone_is_good and answer.status_code == httpx.codes.NOT_FOUND:
                return {}
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            self.promises.refused[str(error.response.status_code)] += 1
            return None
        except httpx.HTTPError as error:
            self.promises.refused[type(error).__name__] += 1
            return None
        self.promises.acknowledged_s.append(time.monotonic())
        found: dict[str, Any] = answer.json() if answer.content else {}
        return found


async def promise_findings(all_promises: Iterable[Promises], urls: Iterable[str], admin_key: str) -> list[str]:
    """Acknowledged changes that are gone or doubled, asked of every gateway."""
    findings = []
    for url in urls:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            for promises in all_promises:
                findings += await _of_one(client, promises, admin_key)
    return findings


async def _of_one(client: httpx.AsyncClient, promises: Promises, admin_key: str) -> list[str]:
    where = f"at {client.base_url}, acknowledged by {promises.region}"
    findings = []
    for name, secret in promises.keys.items():
        if (status := await _status(client, secret, 200)) != 200:
            findings.append(f"key {name} {where}, gets {status}")
    for name, secret in promises.revoked.items():
        if (status := await _status(client, secret, 401)) != 401:
            findings.append(f"revoked key {name} {where}, gets {status}")
    notes = await asyncio.to_thread(_pins, str(client.base_url), admin_key)
    findings += [f"pin {name} {where}, is there {notes[name]} times" for name in promises.pins if notes[name] != 1]
    findings += [f"pin {name} {where} as deleted, is there" for name in promises.unpinned if notes[name]]
    return findings


def _pins(url: str, admin_key: str) -> Counter[str]:
    """How many pins have each note."""
    with open_api(url, admin_key) as api:
        return Counter(pin["note"] for pin in api.pages("/admin/pins")["data"])


async def _status(client: httpx.AsyncClient, secret: str, wanted: int) -> int:
    """The status that a key gets, which may take a gateway a while to know."""
    deadline_s = time.monotonic() + HOLDS_WITHIN_S
    while True:
        answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
        if answer.status_code == wanted or time.monotonic() > deadline_s:
            return answer.status_code
        await asyncio.sleep(0.5)
