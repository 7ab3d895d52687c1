"""What gateways say of the age of their regions' copies of the database, beside what the copies hold."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx2 as httpx
import psycopg

from controlplane.database_address import libpq_url

EVERY_S = 0.5
_WITHIN_S, _COPY_WITHIN_S = 5.0, 1.0
"""Of an answer of a gateway and of a copy. While a copy hangs, its gateway is still asked every other second."""
_ROUNDED_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Told:
    """An answer of a region's `/readyz`, asked at `at_s`. `age_s`: None where the gateway knows none; `true_age_s`: the
    least that the copy's age can have been, None where the copy did not answer.
    """

    region: str
    at_s: float
    age_s: float | None
    behind: bool
    away: bool
    true_age_s: float | None


class Marks:
    """Moments that are written to the primary, one after the other, and when each was acknowledged."""

    def __init__(self, url: str) -> None:
        self._address = libpq_url(url)
        self.acknowledged: list[tuple[int, float]] = []

    async def run(self, until: asyncio.Event) -> None:
        """Write until the event. A primary that is away is asked again."""
        number = 0
        while not until.is_set():
            with suppress(psycopg.Error):
                async with await psycopg.AsyncConnection.connect(self._address, autocommit=True) as connection:
                    await connection.execute("CREATE TABLE IF NOT EXISTS drill_marks (number int PRIMARY KEY)")
                    while not until.is_set():
                        number += 1
                        await connection.execute("INSERT INTO drill_marks VALUES (%s)", [number])
                        self.acknowledged.append((number, time.monotonic()))
                        await asyncio.sleep(EVERY_S / 2)
            await asyncio.sleep(EVERY_S)

    def age_s(self, newest: int, at_s: float) -> float:
        """How old a copy was at least, that had no mark after `newest` at some moment after `at_s`."""
        lacked = next((acknowledged_s for number, acknowledged_s in self.acknowledged if number > newest), at_s)
        return max(0.0, at_s - lacked)


class AgeWatch:
    """Asks every gateway and every copy twice a second. `copies`: their addresses, as SQLAlchemy takes them."""

    def __init__(self, urls: Mapping[str, str], copies: Mapping[str, str], marks: Marks) -> None:
        self._urls = urls
        self._copies = copies
        self._marks = marks
        self.told: list[Told] = []

    async def run(self, until: asyncio.Event) -> None:
        """Ask until the event."""
        async with asyncio.TaskGroup() as group:
            for region in self._urls:
                group.create_task(self._follow(region, until))

    async def _follow(self, region: str, until: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self._urls[region], timeout=_WITHIN_S, trust_env=False) as client:
            while not until.is_set():
                with suppress(httpx.HTTPError):
                    await self._ask(client, region)
                await asyncio.sleep(EVERY_S)

    async def _ask(self, client: httpx.AsyncClient, region: str) -> None:
        """The copy is asked after the gateway, so that what it lacks then, it lacked before."""
        at_s = time.monotonic()
        health = (await client.get("/readyz")).json()
        newest = await _newest_mark(libpq_url(self._copies[region]))
        self.told.append(
            Told(
                region=region,
                at_s=at_s,
                age_s=health["replica_age_s"],
                behind="replica" in health["behind"],
                away="replica" in health["away"],
                true_age_s=None if newest is None else self._marks.age_s(newest, at_s),
            )
        )


async def _newest_mark(address: str) -> int | None:
    """The newest mark that a copy has; None: it does not say."""
    with suppress(psycopg.Error, TimeoutError):
        async with asyncio.timeout(_COPY_WITHIN_S), await psycopg.AsyncConnection.connect(address) as connection:
            row = await (await connection.execute("SELECT coalesce(max(number), 0) FROM drill_marks")).fetchone()
            return int(row[0]) if row else None
    return None


def too_young(told: Sequence[Told]) -> list[str]:
    """Ages that gateways told and that were less than the true ones."""
    return [
        f"{one.region}: told an age of {one.age_s:g} s, and it was {one.true_age_s:.1f} s at least"
        for one in told
        if one.age_s is not None and one.true_age_s is not None and one.age_s + _ROUNDED_S < one.true_age_s
    ]
