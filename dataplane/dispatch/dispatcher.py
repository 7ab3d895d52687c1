"""Which worker runs a request: one prefills it, another decodes it, and others again when a worker is lost.

    waiting --(a prefill worker is ready)--> prefill worker --(first token, KV)--> decode worker --(first output)--> end
       ^                                          | worker lost                        | worker lost
       +------------------------------------------+------------------------------------+

The prefill worker keeps the KV that it made until the decode worker's first output. A request whose worker is lost is
continued from its tokens: with that KV while it is kept, else after another prefill. A worker of the kind "both" never
transfers KV: where all are of this kind, a request is prefilled on the worker where it decodes best.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from dataplane.dispatch.requests import InflightRequest
from dataplane.dispatch.worker import Worker
from dataplane.engines.interface import EngineOutput, EngineRequest, PoolStats
from dataplane.protocol.errors import BadRequestError, DataplaneError, WorkerLostError
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.decode_slots import DecodeSlot, choose_decode_slot
from dataplane.scheduling.pace import PrefillPace
from dataplane.scheduling.prefill import PrefillQueue, PrefillSettings, choose_prefill_slot
from dataplane.scheduling.tiers import TIER_OBJECTIVES

_BATCH_MAX = 32
"""Requests of a model on one decode worker, from which on another worker takes some too."""


class Dispatcher:
    """The requests in flight on the workers of one group. `clock` gives seconds."""

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: PrefillSettings,
        *,
        losses_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._workers = {worker.index: worker for worker in workers}
        self._settings = settings
        self._losses_max = losses_max
        self._clock = clock
        self._in_flight: dict[str, InflightRequest] = {}
        self._running: dict[int, Counter[str]] = {worker.index: Counter() for worker in workers}
        """By worker, the requests in flight of each model; no zeros."""
        self._prefilling = [worker for worker in workers if worker.kind != "decode"]
        self._decoding = [worker for worker in workers if worker.kind != "prefill"]
        self._queues = {worker.index: PrefillQueue() for worker in self._prefilling}
        self._promises: dict[tuple[str, Tier], Objective] = {}
        """The objective of the newest request of each instance and tier."""
        self.handovers_total = 0

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._in_flight)

    @property
    def waits_since_s(self) -> float | None:
        """Since when the request that waits longest for a worker does, by the clock; None if none does."""
        return min((f.waits_since_s for f in self._in_flight.values() if f.waits_since_s is not None), default=None)

    def queue(self, worker: int) -> PrefillQueue:
        """The requests that wait for a first token on a worker."""
        return self._queues.get(worker, PrefillQueue())

    def count(self, worker: int | None) -> int:
        """Requests on a worker; None: those that wait for one."""
        if worker is None:
            return len(self._in_flight) - sum(running.total() for running in self._running.values())
        return self._running[worker].total()

    def prefill_outlook(self, instance_id: str, model: str, tier: Tier) -> tuple[float, float] | None:
        """Seconds until a worker with the instance would begin a new request of the tier, with the objective of the one
        before it, and the worker's pace in seconds a token; None where no worker can take it. `model`: the one whose
        weights it needs; empty: any.
        """
        now_s = self._clock()
        ttft_s = self._promises.get((instance_id, tier), TIER_OBJECTIVES[tier]).ttft_s
        outlooks = []
        for worker in self._prefilling:
            if worker.is_ready(instance_id):
                pool = worker.stats.pool
                ahead = self._queues[worker.index].ahead_of(model, tier, ttft_s, now_s, self._settings)
                outlooks.append((_load_s(ahead, pool), _pace(pool).token_s))
        return min(outlooks, default=None)

    def has(self, instance_id: str) -> bool:
        """Whether a request of the instance is in flight."""
        return any(inflight.request.instance_id == instance_id for inflight in self._in_flight.values())

    def submit(self, request: EngineRequest, model: str) -> InflightRequest:
        """Take a request in. Nothing is left of one that cannot be sent to its worker.

        Raises:
            BadRequestError: its id is in flight already.
            DataplaneError: see `_assign`.
        """
        if request.request_id in self._in_flight:
            raise BadRequestError(f"request {request.request_id} is in flight already", param="request_id")
        inflight = InflightRequest(request=request, model=model, arrived_s=self._clock())
        self._in_flight[request.request_id] = inflight
        try:
            self._assign(inflight)
        except DataplaneError:
            del self._in_flight[request.request_id]
            raise
        self._promises[request.instance_id, request.tier] = request.promise
        return inflight

    def cancel(self, request_id: str) -> None:
        """Remove a request whose client is gone from all workers. One that has ended is ignored."""
        inflight = self._in_flight.get(request_id)
        if inflight is not None:
            self._remove(inflight)

    def receive(self, worker: Worker, output: EngineOutput) -> None:
        """Pass a worker's output to its reader, and a request that was prefilled to a decode worker.

        Outputs of requests that were cancelled meanwhile are dropped.
        """
        inflight = self._in_flight.get(output.request_id)
        if inflight is None or inflight.worker != worker.index:
            if output.kv is not None:
                worker.release(output.request_id)
            return
        inflight.made.extend(output.token_ids)
        inflight.outputs.put(output)
        if inflight.queued_at is not None:
            self._leave_queue(inflight)
        if inflight.kv_at is not None:
            self._release_kv(inflight)
        if output.finish_reason is not None or output.error is not None:
            self._move(inflight, None)
            del self._in_flight[inflight.request_id]
        elif output.kv is not None:
            inflight.kv, inflight.kv_at = output.kv, worker.index
            self.handovers_total += 1
            self._assign_again(inflight)

    def end(self, request_id: str, error: DataplaneError) -> None:
        """End a request with an error. Unknown ids are ignored."""
        inflight = self._in_flight.get(request_id)
        if inflight is not None:
            self._remove(inflight)
            inflight.outputs.put(error)

    def end_instance(self, instance_id: str, error: DataplaneError) -> None:
        """End all requests of an instance."""
        self._promises = {key: promise for key, promise in self._promises.items() if key[0] != instance_id}
        for inflight in self._of_instance(instance_id):
            self.end(inflight.request_id, error)

    def end_all(self, error: DataplaneError) -> None:
        for request_id in list(self._in_flight):
            self.end(request_id, error)

    def assign_waiting(self, instance_id: str) -> None:
        """Send the requests that wait for a worker with this instance."""
        for inflight in self._of_instance(instance_id):
            if inflight.worker is None:
                self._assign_again(inflight)

    def worker_lost(self, worker: Worker, *, died: bool) -> None:
        """Continue the requests of a worker elsewhere: its process is gone, with what it ran and the KV that it kept.

        Requests over which too many workers died end: one of them may be the cause.
        """
        for inflight in self._in_flight.values():
            if inflight.kv_at == worker.index:
                inflight.kv = inflight.kv_at = None
        for inflight in [inflight for inflight in self._in_flight.values() if inflight.worker == worker.index]:
            self._leave_queue(inflight)
            self._move(inflight, None)
            inflight.losses += died
            if inflight.losses > self._losses_max:
                error = WorkerLostError(f"{inflight.losses} workers were lost while they ran this request")
                self.end(inflight.request_id, error)
        for inflight in list(self._in_flight.values()):
            if inflight.worker is None:
                self._assign_again(inflight)

    def end_waiting(self, since_s: float, error: DataplaneError) -> None:
        """End the requests that wait for a worker since `since_s`, by the clock, or longer."""
        waiting = [f for f in self._in_flight.values() if f.waits_since_s is not None and f.waits_since_s <= since_s]
        for inflight in waiting:
            self.end(inflight.request_id, error)

    def _assign(self, inflight: InflightRequest) -> None:
        """Send a request to the worker that shall run it. It waits when none is ready, see `end_waiting`.

        Raises:
            DataplaneError: it cannot be sent, as where a number of it has no encoding.
        """
        if inflight.worker is not None:
            self._move(inflight, None)
        instance_id = inflight.request.instance_id
        workers = self._prefilling if inflight.kv is None else self._decoding
        able = [worker for worker in workers if worker.is_ready(instance_id)]
        if not able:
            if inflight.waits_since_s is None:
                inflight.waits_since_s = self._clock()
            return
        inflight.waits_since_s = None
        chosen = self._choose_prefill(inflight, able) if inflight.kv is None else self._choose_decode(inflight, able)
        self._move(inflight, chosen)
        try:
            self._workers[chosen].add(inflight.continued())
        except Exception as error:
            self._leave_queue(inflight)
            self._move(inflight, None)
            why = f"{type(error).__name__}: {error}"
            raise DataplaneError(f"the request cannot be sent to a worker: {why}") from error

    def _assign_again(self, inflight: InflightRequest) -> None:
        """`_assign` for a request that was taken in before. If it cannot be sent, that ends this request alone."""
        try:
            self._assign(inflight)
        except DataplaneError as error:
            self.end(inflight.request_id, error)

    def _move(self, inflight: InflightRequest, worker: int | None) -> None:
        """Note which worker runs a request, None for none."""
        if inflight.worker is not None:
            running = self._running[inflight.worker]
            running[inflight.model] -= 1
            if not running[inflight.model]:
                del running[inflight.model]
        if worker is not None:
            self._running[worker][inflight.model] += 1
        inflight.worker = worker

    def _choose_prefill(self, inflight: InflightRequest, able: Sequence[Worker]) -> int:
        """Join the queue of a worker: by Aegaeon's algorithm 1, unless the request also decodes there."""
        request = inflight.prefill()
        if all(worker.kind == "both" for worker in able):
            chosen = self._choose_decode(inflight, able)
        else:
            queues = {worker.index: self._queues[worker.index] for worker in able}
            pools = {worker.index: worker.stats.pool for worker in able if queues[worker.index].groups}

            def load_s(worker: int) -> float:
                return _load_s(queues[worker], pools[worker]) if worker in pools else 0.0

            chosen = choose_prefill_slot(request, queues, load_s, self._settings)
        self._queues[chosen] = self._queues[chosen].join(request, self._settings)
        inflight.queued_at = chosen
        return chosen

    def _choose_decode(self, inflight: InflightRequest, able: Sequence[Worker]) -> int:
        slots = [
            DecodeSlot(slot=worker.index, requests=self._running[worker.index], running_model=_running_model(worker))
            for worker in able
        ]
        return choose_decode_slot(inflight.model, slots, batch_max=_BATCH_MAX)

    def _remove(self, inflight: InflightRequest) -> None:
        del self._in_flight[inflight.request_id]
        self._leave_queue(inflight)
        if inflight.worker is not None:
            self._workers[inflight.worker].cancel(inflight.request_id)
            self._move(inflight, None)
        self._release_kv(inflight)

    def _leave_queue(self, inflight: InflightRequest) -> None:
        if inflight.queued_at is not None:
            self._queues[inflight.queued_at] = self._queues[inflight.queued_at].remove(inflight.request_id)
            inflight.queued_at = None

    def _release_kv(self, inflight: InflightRequest) -> None:
        """Free the KV that a prefill worker keeps for a request."""
        if inflight.kv_at is not None:
            self._workers[inflight.kv_at].release(inflight.request_id)
        inflight.kv = inflight.kv_at = None

    def _of_instance(self, instance_id: str) -> list[InflightRequest]:
        return [inflight for inflight in self._in_flight.values() if inflight.request.instance_id == instance_id]


def _load_s(queue: PrefillQueue, pool: PoolStats | None) -> float:
    """Seconds that a prefill queue takes on a worker, by its latest statistics."""
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


def _running_model(worker: Worker) -> str | None:
    pool = worker.stats.pool
    return None if pool is None else pool.running_model
