"""A worker group: the workers of a node that serve the same instances. A worker of the kind "both" is its own group,
unless the setting `together` joins those of one size.

An instance is on every worker of its group; it is ready when one worker of each kind has loaded it. The control plane
knows a group as one slot with several workers.

A request whose worker is lost waits for the next worker process for at most `worker_wait_max_s`, however many processes
die before one can load its instance. That is less than the control plane's own limits for a first and a next token, so
that the client gets the reason. Only a request that runs on a worker when its process dies counts a loss
(`worker_losses_max`), since it may be the cause.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from dataplane.agent.hosted_instances import HostedInstance
from dataplane.agent.workers import NodeResources, WorkerSupervisor
from dataplane.dispatch.dispatcher import Dispatcher
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineOutput, EngineRequest, InstanceStats
from dataplane.protocol.errors import DataplaneError, OverloadedError, UnknownInstanceError, WorkerLostError
from dataplane.protocol.messages import DesiredInstance, InstanceReport, InstanceState
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.recent_tokens import RecentTokens

_RANKS: dict[InstanceState, int] = {"failed": 0, "loading": 1, "draining": 2, "ready": 3}
"""The workers of one kind have the best of their states, a group the worst of its kinds'."""

_SUMMED = ("kv_used_bytes", "kv_capacity_bytes", "remaining_tokens", "running", "waiting")


class WorkerGroup:
    """Workers and the requests on them; their `WorkerOwner`. `on_change` is called when a state has changed. `number`:
    the slot's on the node; `gpus`: of its workers together.
    """

    def __init__(
        self, number: int, indices: Iterable[int], node: NodeResources, *, on_change: Callable[[], None]
    ) -> None:
        settings = node.settings
        self.number = number
        self.gpus = sum(settings.slots[index].gpus for index in indices)
        self._desired: dict[str, DesiredInstance] = {}
        self._on_change = on_change
        self.workers = tuple(WorkerSupervisor(index, node, self) for index in indices)
        self._batch_max = min(settings.step_limits(settings.slots[index]).batch_max for index in indices)
        losses_max, clock = settings.worker_losses_max, time.monotonic
        self.dispatcher = Dispatcher(self.workers, settings.turns.prefill, losses_max=losses_max, clock=clock)
        self._received: dict[str, RecentTokens] = {}
        """Prompt tokens, by instance."""
        self._in_flight_max = settings.queue_max * len(self.workers)
        self._unread_bytes_max = settings.unread_bytes_max
        self._worker_wait_max_s = settings.worker_wait_max_s
        self._wait_ends: asyncio.TimerHandle | None = None

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Host these instances and no others. One whose model changed is loaded again; where only the engine changed,
        its requests continue from their tokens.
        """
        wanted = {instance.instance_id: instance for instance in desired}
        for instance_id, before in self._desired.items():
            if instance_id not in wanted or not wanted[instance_id].model.is_same(before.model):
                gone = UnknownInstanceError(f"instance {instance_id} was taken off this node", param="instance_id")
                self.dispatcher.end_instance(instance_id, gone)
        self._desired = wanted
        self._received = {instance_id: self._received.get(instance_id, RecentTokens()) for instance_id in wanted}
        for worker in self.workers:
            worker.follow(wanted.values())

    def has(self, instance_id: str) -> bool:
        """Whether a worker hosts the instance."""
        return bool(self._hosted(instance_id))

    def host_of(self, instance_id: str) -> str | None:
        """The instance that serves an adapter; None: it has weights of its own, or is not here."""
        instance = self._desired.get(instance_id)
        return None if instance is None else instance.host

    def ready_instance(self, instance_id: str) -> HostedInstance:
        """An instance that takes requests, as one of its workers hosts it.

        Raises:
            UnknownInstanceError: it is not here, or loading, draining or failed.
            WorkerLostError: a worker process was lost and the next one is loading.
        """
        hosted = [one for _, one in self._hosted(instance_id)]
        state = self._state(instance_id)
        if state is None:
            raise UnknownInstanceError(f"instance {instance_id} is not on this node", param="instance_id")
        if state == "loading" and any(one.reloading for one in hosted):
            raise WorkerLostError(f"a worker was lost; instance {instance_id} is being loaded again")
        if state != "ready":
            raise UnknownInstanceError(f"instance {instance_id} is {state}", param="instance_id")
        return next(one for one in hosted if one.state == "ready")

    def check_queue(self) -> None:
        """Refuse a request beyond the limits.

        Raises:
            OverloadedError: too many requests are in flight, or no worker reads its commands.
        """
        in_flight = len(self.dispatcher)
        if in_flight >= self._in_flight_max:
            indices = ", ".join(str(worker.index) for worker in self.workers)
            raise OverloadedError(f"worker {indices} has {in_flight} requests in flight, its limit")
        unread_bytes = min(worker.unread_bytes for worker in self.workers if worker.kind != "decode")
        if unread_bytes >= self._unread_bytes_max:
            limit = f"unread_bytes_max={self._unread_bytes_max}"
            raise OverloadedError(f"the worker has not read {unread_bytes} bytes of its commands; {limit}")

    def kv_tokens_max(self, instance_id: str) -> int:
        """The tokens that a request of a ready instance may have: its KV must fit on every worker.

        Raises:
            WorkerLostError: no worker hosts it any more.
        """
        known = [stats.kv_tokens_max for _, stats in self._stats(instance_id)]
        if not known:
            raise WorkerLostError(f"the worker of instance {instance_id} was lost just now")
        return min(known)

    def submit(self, request: EngineRequest) -> InflightRequest:
        """Send a request to a ready instance; raises as `ready_instance` does."""
        hosted = self.ready_instance(request.instance_id)
        self._received[request.instance_id].add(len(request.prompt), time.monotonic())
        return self.dispatcher.submit(request, hosted.desired.model.checkpoint.name)

    def cancel(self, request: EngineRequest) -> None:
        """Drop a request at once. One that has ended is ignored."""
        self.dispatcher.cancel(request.request_id)
        self._settle()

    def reports(self) -> list[InstanceReport]:
        """The reports of this group's instances for the control plane, without those that are drained."""
        states = [(instance, self._state(instance.instance_id)) for instance in self._desired.values()]
        serving = Counter(instance.model.name for instance, state in states if state == "ready" and _is_own(instance))
        return [self._report(instance, state, serving) for instance, state in states if state is not None]

    def in_use(self, instance_id: str) -> bool:
        """Whether requests of an instance, or of an adapter that it serves, are in flight."""
        adapters = (one.instance_id for one in self._desired.values() if one.host == instance_id)
        return self.dispatcher.has(instance_id) or any(self.dispatcher.has(adapter) for adapter in adapters)

    def has_requests(self, worker: WorkerSupervisor) -> bool:
        return self.dispatcher.count(worker.index) > 0

    def instance_changed(self, instance_id: str) -> None:
        """End the requests of an instance that failed; send those that waited for a worker with it."""
        if self._state(instance_id) == "failed" and not self._orphaned(instance_id):
            error = WorkerLostError(f"instance {instance_id} failed: {self._error(instance_id)}")
            self.dispatcher.end_instance(instance_id, error)
        self.dispatcher.assign_waiting(instance_id)
        self._limit_waiting()
        self._settle()
        self._on_change()

    def outputs_received(self, worker: WorkerSupervisor, outputs: tuple[EngineOutput, ...]) -> None:
        for output in outputs:
            self.dispatcher.receive(worker, output)
        if any(output.kv is not None for output in outputs):  # prefilled: perhaps no decode worker is ready
            self._limit_waiting()
        self._settle()

    def request_refused(self, request_id: str, error: DataplaneError) -> None:
        self.dispatcher.end(request_id, error)
        self._settle()

    def worker_lost(self, worker: WorkerSupervisor, *, died: bool) -> None:
        self.dispatcher.worker_lost(worker, died=died)
        self._limit_waiting()
        self._settle()
        self._on_change()

    def _limit_waiting(self) -> None:
        """Start the timer that ends the requests that wait too long for a worker."""
        since_s = self.dispatcher.waits_since_s
        if since_s is not None and self._wait_ends is None:
            left_s = since_s + self._worker_wait_max_s - time.monotonic()
            self._wait_ends = asyncio.get_running_loop().call_later(left_s, self._end_waiting)

    def _end_waiting(self) -> None:
        self._wait_ends = None
        limit = f"worker_wait_max_s={self._worker_wait_max_s:g}"
        error = WorkerLostError(f"the worker was lost, and no other took over within {limit}")
        self.dispatcher.end_waiting(time.monotonic() - self._worker_wait_max_s, error)
        self._limit_waiting()
        self._settle()

    def _settle(self) -> None:
        for instance in self._desired.values():
            if instance.draining:
                for worker in self.workers:
                    worker.hosted.settle(instance.instance_id)

    def _hosted(self, instance_id: str) -> list[tuple[WorkerSupervisor, HostedInstance]]:
        hosted = ((worker, worker.hosted.get(instance_id)) for worker in self.workers)
        return [(worker, one) for worker, one in hosted if one is not None]

    def _stats(self, instance_id: str) -> list[tuple[WorkerSupervisor, InstanceStats]]:
        stats = ((worker, worker.instance_stats(instance_id)) for worker in self.workers)
        return [(worker, one) for worker, one in stats if one is not None]

    def _state(self, instance_id: str) -> InstanceState | None:
        """The state of an instance over all workers; None when none hosts it."""
        kinds: dict[str, list[InstanceState]] = {}
        for worker, hosted in self._hosted(instance_id):
            kinds.setdefault(worker.kind, []).append(hosted.state)
        best = (max(states, key=_RANKS.__getitem__) for states in kinds.values())
        return min(best, key=_RANKS.__getitem__, default=None)

    def _orphaned(self, instance_id: str) -> bool:
        """Whether an instance failed because worker processes died: the next process may load it."""
        return any(hosted.orphaned for _, hosted in self._hosted(instance_id))

    def _error(self, instance_id: str) -> str | None:
        return next((hosted.error for _, hosted in self._hosted(instance_id) if hosted.error is not None), None)

    def _waits_for(self, instance_id: str) -> str | None:
        """What the first of its workers that does not serve it waits for."""
        waits = (worker.hosted.waits_for(instance_id) for worker in self.workers)
        return next((text for text in waits if text is not None), None)

    def _report(self, instance: DesiredInstance, state: InstanceState, serving: Counter[str]) -> InstanceReport:
        """`serving`: how many ready instances with GPUs of their own each model has here. They share the free KV
        memory, so that it counts once for their endpoint.
        """
        report = InstanceReport(
            instance_id=instance.instance_id,
            model=instance.model.name,
            slot=instance.slot,
            state=state,
            error=self._error(instance.instance_id) if state == "failed" else None,
            waits_for=self._waits_for(instance.instance_id) if state == "loading" else None,
            pooled=not instance.gpus,
            host=instance.host,
        )
        stats = self._stats(instance.instance_id)
        sums = {name: sum(getattr(one, name) for _, one in stats) for name in _SUMMED}
        free_bytes = sums["kv_capacity_bytes"] - sums["kv_used_bytes"]
        if _is_own(instance):
            free_bytes //= max(1, serving[instance.model.name])
        elif not instance.gpus:
            sums["kv_used_bytes"] = sum(one.kv_used_bytes for worker, _ in stats for one in worker.stats.instances)
        sums["kv_capacity_bytes"] = sums["kv_used_bytes"] + free_bytes
        asked = instance.instance_id, instance.model.checkpoint.name
        wait_s, token_s = self.dispatcher.prefill_outlook(*asked, Tier.IW_N) or (None, None)
        urgent_wait_s, _ = self.dispatcher.prefill_outlook(*asked, Tier.IW_F) or (None, None)
        fits = [one.kv_tokens_max for _, one in stats]
        return msgspec.structs.replace(
            report,
            **sums,
            prefill_wait_s=wait_s,
            prefill_urgent_wait_s=urgent_wait_s,
            prefill_token_s=token_s,
            context_tokens=min(instance.model.context_tokens, *fits) if fits else None,
            batch_max=self._batch_max * sum(worker.kind != "prefill" for worker, _ in stats),
            input_tokens_per_s=self._received[instance.instance_id].per_s(time.monotonic()),
            prefill_s=max((one.prefill_s for _, one in stats if one.prefill_s is not None), default=None),
            decode_s=max((one.decode_s for _, one in stats if one.decode_s is not None), default=None),
        )


def _is_own(instance: DesiredInstance) -> bool:
    """Whether it has GPUs of its own, and is not lent out."""
    return bool(instance.gpus) and not instance.spot
