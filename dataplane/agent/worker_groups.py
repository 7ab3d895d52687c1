"""A pool: the slots of a node that serve instances together. A slot that does both kinds of work is a pool of one,
unless the settings put such slots `together`.

In a pool an instance stands on every slot: it is ready when one of each kind has it. The control plane knows a pool as
one slot, which several workers share.

A request whose worker is lost waits for the next one, however many die before they can load its instance, as long as
its client may: `worker_wait_max_s`. That is less than the control plane's own limits for a first and a next token, so
that the client is told why. Only a request that runs on a worker when it dies counts a loss (`worker_losses_max`): it
may be the cause.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import msgspec

from dataplane.agent.dispatch import Dispatcher
from dataplane.agent.host_files import HostFiles
from dataplane.agent.hosted_instances import HostedInstance
from dataplane.agent.requests import InflightRequest
from dataplane.agent.settings import AgentSettings
from dataplane.agent.tokenization import Text
from dataplane.agent.workers import Slot
from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.protocol.errors import DataplaneError, OverloadedError, UnknownInstanceError, WorkerLostError
from dataplane.protocol.messages import DesiredInstance, InstanceReport, InstanceState
from dataplane.protocol.tiers import Tier

_RANKS: dict[InstanceState, int] = {"failed": 0, "loading": 1, "draining": 2, "ready": 3}
"""How good a state is. A kind of slots is as good as its best one, a pool as its worst kind."""

_SUMMED = ("kv_used_bytes", "kv_capacity_bytes", "remaining_tokens", "running", "waiting")


class Pool:
    """Slots and the requests on them; their `SlotOwner`. `on_change`: the control plane should hear of a change."""

    def __init__(
        self,
        indices: Iterable[int],
        settings: AgentSettings,
        files: HostFiles,
        texts: WeakValueDictionary[str, Text],
        *,
        on_change: Callable[[], None],
    ) -> None:
        self._desired: dict[str, DesiredInstance] = {}
        self._on_change = on_change
        self.slots = tuple(Slot(index, settings, files, texts, self) for index in indices)
        self.dispatcher = Dispatcher(self.slots, settings.turns.prefill, losses_max=settings.worker_losses_max)
        self._in_flight_max = settings.queue_max * len(self.slots)
        self._unread_bytes_max = settings.unread_bytes_max
        self._worker_wait_max_s = settings.worker_wait_max_s

        self._wait_ends: asyncio.TimerHandle | None = None

    def follow(self, desired: Iterable[DesiredInstance]) -> None:
        """Make the pool hold these instances and no others. One whose model changed is loaded anew; where another
        engine takes over, requests go on from their tokens.
        """
        wanted = {instance.instance_id: instance for instance in desired}
        for instance_id, before in self._desired.items():
            if instance_id not in wanted or not wanted[instance_id].model.is_same(before.model):
                gone = UnknownInstanceError(f"instance {instance_id} was taken off this node", param="instance_id")
                self.dispatcher.end_instance(instance_id, gone)
        self._desired = wanted
        for slot in self.slots:
            slot.follow(wanted.values())

    def has(self, instance_id: str) -> bool:
        """Whether the instance is in this pool."""
        return any(slot.hosted(instance_id) is not None for slot in self.slots)

    def ready_instance(self, instance_id: str) -> HostedInstance:
        """An instance that takes requests, as one of its slots holds it.

        Raises:
            UnknownInstanceError: it is not here, or loading, draining or failed.
            WorkerLostError: a worker was lost and its successor is loading.
        """
        hosted = [hosted for slot in self.slots if (hosted := slot.hosted(instance_id)) is not None]
        state = self._state(instance_id)
        if state is None:
            raise UnknownInstanceError(f"instance {instance_id} is not on this node", param="instance_id")
        if state == "loading" and any(one.reloading for one in hosted):
            raise WorkerLostError(f"a worker was lost; instance {instance_id} is being loaded again")
        if state != "ready":
            raise UnknownInstanceError(f"instance {instance_id} is {state}", param="instance_id")
        return next(one for one in hosted if one.state == "ready")

    def check_queue(self) -> None:
        """Refuse what is too much.

        Raises:
            OverloadedError: too many requests are in flight, or no worker reads what it was sent.
        """
        in_flight = len(self.dispatcher)
        if in_flight >= self._in_flight_max:
            indices = ", ".join(str(slot.index) for slot in self.slots)
            raise OverloadedError(f"slot {indices} has {in_flight} requests in flight, its limit")
        unread_bytes = min(slot.unread_bytes for slot in self.slots if slot.kind != "decode")
        if unread_bytes >= self._unread_bytes_max:
            limit = f"unread_bytes_max={self._unread_bytes_max}"
            raise OverloadedError(f"the worker has not read {unread_bytes} bytes of its commands; {limit}")

    def kv_tokens_max(self, instance_id: str) -> int:
        """The tokens that a request of a ready instance may have: it must fit on every slot.

        Raises:
            WorkerLostError: no worker holds it any more.
        """
        known = [tokens for slot in self.slots if (tokens := slot.kv_tokens_max(instance_id)) is not None]
        if not known:
            raise WorkerLostError(f"the worker of instance {instance_id} was lost just now")
        return min(known)

    def submit(self, request: EngineRequest) -> InflightRequest:
        """Send a request to a ready instance; raises as `ready_instance` does."""
        hosted = self.ready_instance(request.instance_id)
        return self.dispatcher.submit(request, hosted.desired.model.name)

    def cancel(self, request: EngineRequest) -> None:
        """Drop a request at once. One that has ended is ignored."""
        self.dispatcher.cancel(request.request_id)
        self._settle()

    def end_all(self, error: DataplaneError) -> None:
        """End all requests."""
        self.dispatcher.end_all(error)

    def reports(self) -> list[InstanceReport]:
        """What the control plane hears of this pool's instances. Drained ones are gone from it."""
        states = [(instance, self._state(instance.instance_id)) for instance in self._desired.values()]
        serving = Counter(instance.model.name for instance, state in states if state == "ready" and _is_own(instance))
        return [self._report(instance, state, serving) for instance, state in states if state is not None]

    def in_use(self, instance_id: str) -> bool:
        """Whether requests of an instance are in flight."""
        return self.dispatcher.has(instance_id)

    def changed(self, instance_id: str) -> None:
        """An instance came, went, or changed its state on a slot: requests may go on, or never will."""
        if self._state(instance_id) == "failed" and not self._orphaned(instance_id):
            error = WorkerLostError(f"instance {instance_id} failed: {self._error(instance_id)}")
            self.dispatcher.end_instance(instance_id, error)
        self.dispatcher.place_waiting(instance_id)
        self._limit_waiting()
        self._settle()
        self._on_change()

    def heard(self, slot: Slot, outputs: tuple[EngineOutput, ...]) -> None:
        """A worker made tokens."""
        for output in outputs:
            self.dispatcher.hear(slot, output)
        if any(output.kv is not None for output in outputs):  # handed over: perhaps to nobody
            self._limit_waiting()
        self._settle()

    def refused(self, request_id: str, error: DataplaneError) -> None:
        """A worker did not take a request."""
        self.dispatcher.end(request_id, error)
        self._settle()

    def lost(self, slot: Slot, *, died: bool) -> None:
        """A worker is gone, with all it had."""
        self.dispatcher.lose(slot, died=died)
        self._limit_waiting()
        self._settle()
        self._on_change()

    def _limit_waiting(self) -> None:
        """See to it that no request waits for a worker for ever."""
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
                for slot in self.slots:
                    slot.settle(instance.instance_id)

    def _state(self, instance_id: str) -> InstanceState | None:
        """The state of an instance over all slots; None when it is on none."""
        kinds: dict[str, list[InstanceState]] = {}
        for slot in self.slots:
            hosted = slot.hosted(instance_id)
            if hosted is not None:
                kinds.setdefault(slot.kind, []).append(hosted.state)
        best = (max(states, key=_RANKS.__getitem__) for states in kinds.values())
        return min(best, key=_RANKS.__getitem__, default=None)

    def _orphaned(self, instance_id: str) -> bool:
        """Whether a failed instance may yet come back, since it was workers that died."""
        hosted = (slot.hosted(instance_id) for slot in self.slots)
        return any(one.orphaned for one in hosted if one is not None)

    def _error(self, instance_id: str) -> str | None:
        hosted = (slot.hosted(instance_id) for slot in self.slots)
        return next((one.error for one in hosted if one is not None and one.error is not None), None)

    def _waits_for(self, instance_id: str) -> str | None:
        """What the first of its slots that does not serve it waits for."""
        return next((words for slot in self.slots if (words := slot.waits_for(instance_id)) is not None), None)

    def _report(self, instance: DesiredInstance, state: InstanceState, serving: Counter[str]) -> InstanceReport:
        """`serving`: how many ready instances with GPUs of their own each model has here. They share the KV that is
        free, so that it counts once for their endpoint.
        """
        report = InstanceReport(
            instance_id=instance.instance_id,
            model=instance.model.name,
            slot=instance.slot,
            state=state,
            error=self._error(instance.instance_id) if state == "failed" else None,
            waits_for=self._waits_for(instance.instance_id) if state == "loading" else None,
        )
        stats = {slot: stats for slot in self.slots if (stats := slot.instance_stats(instance.instance_id)) is not None}
        sums = {name: sum(getattr(one, name) for one in stats.values()) for name in _SUMMED}
        free_bytes = sums["kv_capacity_bytes"] - sums["kv_used_bytes"]
        if _is_own(instance):
            free_bytes //= max(1, serving[instance.model.name])
        elif not instance.gpus:
            sums["kv_used_bytes"] += sum(slot.kv_used_beside_bytes(instance.instance_id) for slot in stats)
        sums["kv_capacity_bytes"] = sums["kv_used_bytes"] + free_bytes
        wait_s, token_s = self.dispatcher.prefill_outlook(instance.instance_id, Tier.IW_N) or (None, None)
        urgent_wait_s, _ = self.dispatcher.prefill_outlook(instance.instance_id, Tier.IW_F) or (None, None)
        fits = [one.kv_tokens_max for one in stats.values()]
        return msgspec.structs.replace(
            report,
            **sums,
            prefill_wait_s=wait_s,
            prefill_urgent_wait_s=urgent_wait_s,
            prefill_token_s=token_s,
            context_tokens=min(instance.model.context_tokens, *fits) if fits else None,
        )


def _is_own(instance: DesiredInstance) -> bool:
    """Whether it has GPUs of its own, and is not lent out."""
    return bool(instance.gpus) and not instance.spot
