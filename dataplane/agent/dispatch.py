"""Which slot runs a request: one prefills it, another decodes it, and others again when a worker is lost.

    waiting --(a prefill slot is ready)--> prefill slot --(first token, KV)--> decode slot --(first output)--> end
       ^                                       | worker lost                      | worker lost
       +---------------------------------------+----------------------------------+

The prefill slot holds the KV it handed over until the decode slot's first output. A request whose worker is lost goes
on from its tokens: with that KV while it is held, else through a prefill slot. A slot that does both never hands over:
where all do, a request is prefilled on the slot where it decodes best.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from dataplane.agent.requests import InflightRequest
from dataplane.agent.workers import Slot
from dataplane.engines.interface import EngineOutput, EngineRequest, PoolStats
from dataplane.protocol.errors import BadRequestError, DataplaneError, WorkerLostError
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.decode_slots import DecodeSlot, choose_decode_slot
from dataplane.scheduling.pace import PrefillPace
from dataplane.scheduling.prefill import PrefillQueue, PrefillSettings, choose_prefill_slot
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from dataplane.worker.frames import Add, Cancel, Release

_JOINED_MAX = 32
"""Requests of a model on one decode slot, from which on another slot takes some too."""


class Dispatcher:
    """The requests in flight on the slots of one pool."""

    def __init__(
        self,
        slots: Sequence[Slot],
        settings: PrefillSettings,
        *,
        losses_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = {slot.index: slot for slot in slots}
        self._settings = settings
        self._losses_max = losses_max
        self._clock = clock
        self._in_flight: dict[str, InflightRequest] = {}
        self._on: dict[int, Counter[str]] = {slot.index: Counter() for slot in slots}
        """By slot, the requests in flight of each model; no zeros."""
        self._prefilling = [slot for slot in slots if slot.kind != "decode"]
        self._decoding = [slot for slot in slots if slot.kind != "prefill"]
        self._queues = {slot.index: PrefillQueue() for slot in self._prefilling}
        self._promises: dict[tuple[str, Tier], Objective] = {}
        """What the newest request of an instance and tier was promised."""
        self.handovers_total = 0

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._in_flight)

    @property
    def waits_since_s(self) -> float | None:
        """Since when the request that waits longest for a slot does, by the clock; None if none does."""
        return min((f.waits_since_s for f in self._in_flight.values() if f.waits_since_s is not None), default=None)

    def queue(self, slot: int) -> PrefillQueue:
        """Who waits for a first token on a slot."""
        return self._queues.get(slot, PrefillQueue())

    def count(self, slot: int | None) -> int:
        """Requests on a slot; those that wait for one for None."""
        if slot is None:
            return len(self._in_flight) - sum(sum(requests.values()) for requests in self._on.values())
        return sum(self._on[slot].values())

    def prefill_outlook(self, instance_id: str, tier: Tier) -> tuple[float, float] | None:
        """Seconds until a slot with the instance would begin a request of the tier that came now, promised what the one
        before it was, and its pace in seconds a token; None where no slot can take it.
        """
        now_s = self._clock()
        ttft_s = self._promises.get((instance_id, tier), TIER_OBJECTIVES[tier]).ttft_s
        outlooks = []
        for slot in self._prefilling:
            if slot.is_ready(instance_id):
                pool = slot.stats.pool
                ahead = self._queues[slot.index].ahead_of(tier, ttft_s, now_s, self._settings)
                outlooks.append((_load_s(ahead, pool), _pace(pool).token_s))
        return min(outlooks, default=None)

    def has(self, instance_id: str) -> bool:
        """Whether a request of the instance is in flight."""
        return any(inflight.request.instance_id == instance_id for inflight in self._in_flight.values())

    def submit(self, request: EngineRequest, model: str) -> InflightRequest:
        """Take a request in.

        Raises:
            BadRequestError: its id is in flight already.
        """
        if request.request_id in self._in_flight:
            raise BadRequestError(f"request {request.request_id} is in flight already", param="request_id")
        inflight = InflightRequest(request=request, model=model, arrived_s=self._clock())
        self._in_flight[request.request_id] = inflight
        self._promises[request.instance_id, request.tier] = request.promise
        self._place(inflight)
        return inflight

    def cancel(self, request_id: str) -> None:
        """Forget a request whose client is gone, everywhere. One that has ended is ignored."""
        inflight = self._in_flight.get(request_id)
        if inflight is not None:
            self._forget(inflight)

    def hear(self, slot: Slot, output: EngineOutput) -> None:
        """Pass a worker's output on, and a request that it handed over to a decode slot.

        What belongs to requests that were cancelled meanwhile is dropped.
        """
        inflight = self._in_flight.get(output.request_id)
        if inflight is None or inflight.slot != slot.index:
            if output.kv is not None:
                slot.send(Release(request_id=output.request_id))
            return
        inflight.made.extend(output.token_ids)
        inflight.outputs.put(output)
        if inflight.queued_at is not None:
            self._leave_queue(inflight)
        if inflight.holder is not None:
            self._release_kv(inflight)
        if output.finish_reason is not None or output.error is not None:
            self._move(inflight, None)
            del self._in_flight[inflight.request_id]
        elif output.kv is not None:
            inflight.kv, inflight.holder = output.kv, slot.index
            self.handovers_total += 1
            self._place(inflight)

    def end(self, request_id: str, error: DataplaneError) -> None:
        """End a request with an error. Unknown ids are ignored."""
        inflight = self._in_flight.get(request_id)
        if inflight is not None:
            self._forget(inflight)
            inflight.outputs.put(error)

    def end_instance(self, instance_id: str, error: DataplaneError) -> None:
        """End all requests of an instance."""
        self._promises = {key: promise for key, promise in self._promises.items() if key[0] != instance_id}
        for inflight in self._of_instance(instance_id):
            self.end(inflight.request_id, error)

    def end_all(self, error: DataplaneError) -> None:
        """End all requests."""
        for request_id in list(self._in_flight):
            self.end(request_id, error)

    def place_waiting(self, instance_id: str) -> None:
        """Send on what waits for a slot with this instance."""
        for inflight in self._of_instance(instance_id):
            if inflight.slot is None:
                self._place(inflight)

    def lose(self, slot: Slot, *, died: bool) -> None:
        """A worker is gone, with what it ran and held: the requests go on elsewhere.

        Those over which too many workers died end: one of them may be the cause.
        """
        for inflight in self._in_flight.values():
            if inflight.holder == slot.index:
                inflight.kv = inflight.holder = None
        for inflight in [inflight for inflight in self._in_flight.values() if inflight.slot == slot.index]:
            self._leave_queue(inflight)
            self._move(inflight, None)
            inflight.losses += died
            if inflight.losses > self._losses_max:
                error = WorkerLostError(f"{inflight.losses} workers were lost while they ran this request")
                self.end(inflight.request_id, error)
        for inflight in list(self._in_flight.values()):
            if inflight.slot is None:
                self._place(inflight)

    def end_waiting(self, since_s: float, error: DataplaneError) -> None:
        """End the requests that wait for a slot since `since_s`, by the clock, or longer."""
        waiting = [f for f in self._in_flight.values() if f.waits_since_s is not None and f.waits_since_s <= since_s]
        for inflight in waiting:
            self.end(inflight.request_id, error)

    def _place(self, inflight: InflightRequest) -> None:
        """Send a request to the slot that shall run it. It waits when none is ready, see `end_waiting`."""
        if inflight.slot is not None:
            self._move(inflight, None)
        instance_id = inflight.request.instance_id
        slots = self._prefilling if inflight.kv is None else self._decoding
        able = [slot for slot in slots if slot.is_ready(instance_id)]
        if not able:
            if inflight.waits_since_s is None:
                inflight.waits_since_s = self._clock()
            return
        inflight.waits_since_s = None
        chosen = self._choose_prefill(inflight, able) if inflight.kv is None else self._choose_decode(inflight, able)
        self._move(inflight, chosen)
        self._slots[chosen].send(Add(request=inflight.continued()))

    def _move(self, inflight: InflightRequest, slot: int | None) -> None:
        """Note which slot runs a request, None for none."""
        if inflight.slot is not None:
            requests = self._on[inflight.slot]
            requests[inflight.model] -= 1
            if not requests[inflight.model]:
                del requests[inflight.model]
        if slot is not None:
            self._on[slot][inflight.model] += 1
        inflight.slot = slot

    def _choose_prefill(self, inflight: InflightRequest, able: Sequence[Slot]) -> int:
        """Join the queue of a slot: by Aegaeon's algorithm 1, unless it stays there to decode."""
        request = inflight.prefill()
        if all(slot.kind == "both" for slot in able):
            chosen = self._choose_decode(inflight, able)
        else:
            queues = {slot.index: self._queues[slot.index] for slot in able}
            pools = {slot.index: slot.stats.pool for slot in able if queues[slot.index].groups}

            def load_s(slot: int) -> float:
                return _load_s(queues[slot], pools[slot]) if slot in pools else 0.0

            chosen = choose_prefill_slot(request, queues, load_s, self._settings).slot
        self._queues[chosen] = self._queues[chosen].join(request, self._settings)
        inflight.queued_at = chosen
        return chosen

    def _choose_decode(self, inflight: InflightRequest, able: Sequence[Slot]) -> int:
        slots = [
            DecodeSlot(slot=slot.index, requests=self._on[slot.index], running_model=_running_model(slot))
            for slot in able
        ]
        return choose_decode_slot(inflight.model, slots, batch_max=_JOINED_MAX)

    def _forget(self, inflight: InflightRequest) -> None:
        del self._in_flight[inflight.request_id]
        self._leave_queue(inflight)
        if inflight.slot is not None:
            self._slots[inflight.slot].send(Cancel(request_id=inflight.request_id))
            self._move(inflight, None)
        self._release_kv(inflight)

    def _leave_queue(self, inflight: InflightRequest) -> None:
        if inflight.queued_at is not None:
            self._queues[inflight.queued_at] = self._queues[inflight.queued_at].remove(inflight.request_id)
            inflight.queued_at = None

    def _release_kv(self, inflight: InflightRequest) -> None:
        """Nobody needs the KV any more that a prefill slot holds for a request."""
        if inflight.holder is not None:
            self._slots[inflight.holder].send(Release(request_id=inflight.request_id))
        inflight.kv = inflight.holder = None

    def _of_instance(self, instance_id: str) -> list[InflightRequest]:
        return [inflight for inflight in self._in_flight.values() if inflight.request.instance_id == instance_id]


def _load_s(queue: PrefillQueue, pool: PoolStats | None) -> float:
    """Seconds that a prefill queue takes on a slot, by what that told last."""
    if not queue.groups:
        return 0.0
    pace = _pace(pool)
    base_s, token_s, switch_s = pace.base_s, pace.token_s, pace.switch_s
    return queue.load_s(
        lambda waiting: sum([base_s + request.tokens * token_s for request in waiting]),
        lambda _: switch_s,
        None if pool is None else pool.running_model,
    )


def _pace(pool: PoolStats | None) -> PrefillPace:
    return PrefillPace() if pool is None else pool.prefill_pace


def _running_model(slot: Slot) -> str | None:
    pool = slot.stats.pool
    return None if pool is None else pool.running_model
