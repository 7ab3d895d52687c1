"""Admission at a gateway: interactive requests are admitted or refused, flex requests queue for spare capacity.

A flex request that is admitted is sent before the next one is looked at, and counts from then on. So as many are
admitted at once as there is capacity for, and no more.
"""

import asyncio
import time
from collections import deque

from controlplane.errors import BusyError, NoSpareCapacityError
from controlplane.policies.admission import AdmissionSettings, choose_admission
from controlplane.policies.decisions import Admit, Refuse
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.routing import RoutingSettings
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from dataplane.protocol.tiers import Tier


class AdmissionController:
    """Admits requests; one for each gateway. Flex requests queue by model, first in, first out."""

    def __init__(self, sender: Sender, fleet: FleetCache, settings: Settings) -> None:
        self._sender = sender
        self._fleet = fleet
        self._settings = settings
        self._policy = AdmissionSettings(
            routing=RoutingSettings(utilization_max=settings.route_utilization_max, stale_s=settings.heartbeat_stale_s),
            iw_f_margin=settings.admission_iw_f_margin,
            iw_n_margin=settings.admission_iw_n_margin,
            flex_below=settings.release_below_one,
        )
        self._queues: dict[str, deque[asyncio.Event]] = {}

    @property
    def waiting(self) -> int:
        """Flex requests in the queues."""
        return sum(map(len, self._queues.values()))

    async def enter(self, request: InFlightRequest) -> RoutingFacts:
        """Return when the request is admitted, with the facts by which it was. The caller sends it before it waits for
        anything else, so that the next one sees it counted.

        Raises:
            BusyError: no instance would begin an interactive request in time.
            NoSpareCapacityError: there was no spare capacity for a flex request for as long as it may wait.
        """
        if request.message.tier != Tier.NIW or request.message.model not in self._queues:
            facts = self._sender.routing_facts(request)
            decision = choose_admission(facts, time.time(), self._policy)
            if isinstance(decision, Refuse):
                raise BusyError(decision.reason, retry_after_s=decision.retry_after_s)
            if isinstance(decision, Admit):
                return facts
        return await self._wait(request)

    async def _wait(self, request: InFlightRequest) -> RoutingFacts:
        """Wait for this request's turn, then for spare capacity. Whoever leaves the head of the queue, admitted or not,
        gives the next one its turn.
        """
        wait_s = self._settings.flex_wait_s
        if self.waiting >= self._settings.flex_waiting_max or wait_s == 0:
            raise _no_capacity(0)
        queue = self._queues.setdefault(request.message.model, deque())
        turn = asyncio.Event()
        queue.append(turn)
        queue[0].set()
        try:
            async with asyncio.timeout(wait_s):
                await turn.wait()
                return await self._spare_capacity(request)
        except TimeoutError:
            raise _no_capacity(wait_s) from None
        finally:
            queue.remove(turn)
            if queue:
                queue[0].set()
            else:
                del self._queues[request.message.model]

    async def _spare_capacity(self, request: InFlightRequest) -> RoutingFacts:
        """The facts by which the first of a queue is admitted. It looks again whenever something has changed."""
        while True:
            facts = self._sender.routing_facts(request)
            if isinstance(choose_admission(facts, time.time(), self._policy), Admit):
                return facts
            await self._fleet.changed()


def _no_capacity(waited_s: float) -> NoSpareCapacityError:
    return NoSpareCapacityError(
        f"no spare capacity for flex requests in {waited_s:g} s; try later, or use the Batch API, which waits a day"
    )
