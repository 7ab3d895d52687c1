"""Admission at a gateway: interactive requests are admitted or refused, flex requests queue for spare capacity."""

import asyncio
import time
from collections import deque

from controlplane.errors import BusyError, NoSpareCapacityError
from controlplane.policies.admission import AdmissionSettings, choose_admission
from controlplane.policies.decisions import Admit, Refuse, Wait
from controlplane.policies.facts import AdmissionFacts
from controlplane.policies.routing import RoutingSettings
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.send import Outgoing, Sender
from controlplane.settings import Settings
from dataplane.protocol.tiers import Tier


class AdmissionController:
    """Admits requests; one for each gateway. Flex requests queue by model, first come, first served."""

    def __init__(self, fleet: FleetCache, sender: Sender, settings: Settings) -> None:
        self._fleet = fleet
        self._sender = sender
        self._settings = settings
        self._policy = AdmissionSettings(
            routing=RoutingSettings(utilization_max=settings.route_utilization_max, stale_s=settings.heartbeat_stale_s),
            iw_f_margin=settings.admission_iw_f_margin,
            iw_n_margin=settings.admission_iw_n_margin,
            flex_below=settings.release_below_one,
        )
        self._lines: dict[str, deque[tuple[Outgoing, asyncio.Future[None]]]] = {}
        self._callers: dict[str, asyncio.Task[None]] = {}

    @property
    def waiting(self) -> int:
        """Flex requests in line."""
        return sum(map(len, self._lines.values()))

    async def enter(self, outgoing: Outgoing) -> None:
        """Return when the request may go on.

        Raises:
            BusyError: no instance would begin an interactive request in time.
            NoSpareCapacityError: there was no room for a flex request as long as it may wait.
        """
        line = self._lines.get(outgoing.model.name) if outgoing.tier == Tier.NIW else None
        decision = Wait() if line else self._decide(outgoing)
        if isinstance(decision, Refuse):
            raise BusyError(decision.reason, retry_after_s=decision.retry_after_s)
        if isinstance(decision, Wait):
            await self._wait(outgoing)

    def _decide(self, outgoing: Outgoing) -> Admit | Refuse | Wait:
        facts = AdmissionFacts(
            routing=self._sender.routing_facts(outgoing),
            objective=self._fleet.objective(outgoing.model, outgoing.tier),
        )
        return choose_admission(facts, time.time(), self._policy)

    async def _wait(self, outgoing: Outgoing) -> None:
        wait_s = self._settings.flex_wait_s
        if self.waiting >= self._settings.flex_waiting_max or wait_s == 0:
            raise _no_room(0)
        name = outgoing.model.name
        line = self._lines.setdefault(name, deque())
        place = (outgoing, asyncio.get_running_loop().create_future())
        line.append(place)
        if name not in self._callers:
            self._callers[name] = asyncio.create_task(self._call(name))
        try:
            async with asyncio.timeout(wait_s):
                await place[1]
        except TimeoutError:
            raise _no_room(wait_s) from None
        finally:
            if place in line:
                line.remove(place)

    async def _call(self, name: str) -> None:
        """Let the first of a line in whenever there is room, until the line is empty."""
        line = self._lines[name]
        try:
            while line:
                await asyncio.sleep(self._settings.view_refresh_s)
                if line and isinstance(self._decide(line[0][0]), Admit):
                    future = line.popleft()[1]
                    if not future.done():
                        future.set_result(None)
        finally:
            del self._lines[name], self._callers[name]


def _no_room(waited_s: float) -> NoSpareCapacityError:
    return NoSpareCapacityError(
        f"no spare capacity for flex requests in {waited_s:g} s; try later, or use the Batch API, which waits a day"
    )
