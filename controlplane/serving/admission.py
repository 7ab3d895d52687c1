"""Admission at a gateway: interactive requests are admitted or refused, flex requests queue for spare capacity."""

import asyncio
import time
from collections import deque

from controlplane.errors import BusyError, NoSpareCapacityError
from controlplane.policies.admission import AdmissionSettings, choose_admission
from controlplane.policies.decisions import Admit, Refuse, Wait
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.routing import RoutingSettings
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from dataplane.protocol.tiers import Tier


class AdmissionController:
    """Admits requests; one for each gateway. Flex requests queue by model, first in, first out."""

    def __init__(self, sender: Sender, settings: Settings) -> None:
        self._sender = sender
        self._settings = settings
        self._policy = AdmissionSettings(
            routing=RoutingSettings(utilization_max=settings.route_utilization_max, stale_s=settings.heartbeat_stale_s),
            iw_f_margin=settings.admission_iw_f_margin,
            iw_n_margin=settings.admission_iw_n_margin,
            flex_below=settings.release_below_one,
        )
        self._queues: dict[str, deque[tuple[InFlightRequest, asyncio.Future[None]]]] = {}
        self._admitting: dict[str, asyncio.Task[None]] = {}

    @property
    def waiting(self) -> int:
        """Flex requests in the queues."""
        return sum(map(len, self._queues.values()))

    async def enter(self, request: InFlightRequest) -> RoutingFacts | None:
        """Return when the request is admitted: with the facts by which it was, None if it had to wait.

        Raises:
            BusyError: no instance would begin an interactive request in time.
            NoSpareCapacityError: there was no spare capacity for a flex request for as long as it may wait.
        """
        queue = self._queues.get(request.message.model) if request.message.tier == Tier.NIW else None
        if not queue:
            facts = self._sender.routing_facts(request)
            decision = self._decide(facts)
            if isinstance(decision, Refuse):
                raise BusyError(decision.reason, retry_after_s=decision.retry_after_s)
            if isinstance(decision, Admit):
                return facts
        await self._wait(request)
        return None

    def _decide(self, facts: RoutingFacts) -> Admit | Refuse | Wait:
        return choose_admission(facts, time.time(), self._policy)

    async def _wait(self, request: InFlightRequest) -> None:
        wait_s = self._settings.flex_wait_s
        if self.waiting >= self._settings.flex_waiting_max or wait_s == 0:
            raise _no_capacity(0)
        model = request.message.model
        queue = self._queues.setdefault(model, deque())
        entry = (request, asyncio.get_running_loop().create_future())
        queue.append(entry)
        if model not in self._admitting:
            self._admitting[model] = asyncio.create_task(self._admit_queued(model))
        try:
            async with asyncio.timeout(wait_s):
                await entry[1]
        except TimeoutError:
            raise _no_capacity(wait_s) from None
        finally:
            if entry in queue:
                queue.remove(entry)

    async def _admit_queued(self, model: str) -> None:
        """Admit the first of a queue whenever there is spare capacity, until the queue is empty."""
        queue = self._queues[model]
        try:
            while queue:
                await asyncio.sleep(self._settings.view_refresh_s)
                if queue and isinstance(self._decide(self._sender.routing_facts(queue[0][0])), Admit):
                    future = queue.popleft()[1]
                    if not future.done():
                        future.set_result(None)
        finally:
            del self._queues[model], self._admitting[model]


def _no_capacity(waited_s: float) -> NoSpareCapacityError:
    return NoSpareCapacityError(
        f"no spare capacity for flex requests in {waited_s:g} s; try later, or use the Batch API, which waits a day"
    )
