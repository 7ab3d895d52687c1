"""A slot of a pool as a process in simulated time: between two steps it reads its commands, as a worker does.

The engine's `sleep` is where simulated time passes, deep inside a step: a greenlet leaves from there to the event loop
and comes back when the time has passed.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial

from greenlet import greenlet  # type: ignore[import-untyped]

from dataplane.dispatch.worker import WorkerKind
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats
from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.messages import ModelSpec
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.events import END, Events
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.servers.fast_forward_engine import FastForwardEngine
from ops.simulator.servers.fast_forward_models import ServedOf
from ops.simulator.servers.pool_log import LoggedEngine, PoolLog

STATS_S = 0.25
"""How old what a slot tells of itself may be, and how long an idle one waits for a command before it takes a step
without work: as with a worker.
"""

OnStep = Callable[["SlotProcess", list[EngineOutput], FastForward | None], None]
"""Called with what a step made, and its decode steps."""


class SlotProcess:
    """One slot; a `dataplane.dispatch.worker.Worker` for the live dispatcher."""

    def __init__(
        self,
        index: int,
        kind: WorkerKind,
        settings: ReplaySettings,
        events: Events,
        on_step: OnStep,
        served: ServedOf,
        *,
        answers: AnswersByModel,
        gpus: int = 1,
        renews: bool = False,
        log: PoolLog | None = None,
    ) -> None:
        """`gpus`: of the slot. `served`, `answers`, `renews`: see `FastForwardEngine`. `log`: its pool's."""
        self.index = index
        self.kind = kind
        self.open = True
        """Whether it takes requests."""
        self.busy_s = 0.0
        waits = (settings, lambda: events.now_s, self._sleep, self._sleep_fast_forward, served)
        self.engine = (
            FastForwardEngine(*waits, answers=answers, renews=renews)
            if log is None
            else LoggedEngine(*waits, answers=answers, renews=renews, log=log)
        )
        self._gpus = gpus
        self._events = events
        self._on_step = on_step
        self._inbox: list[Callable[[], None]] = []
        self._stats = EngineStats()
        self._stats_s = float("-inf")
        self._fast_forward: FastForward | None = None
        self._sleep_number = 0
        self._parked = True
        self._idle_since_s = math.inf
        """Since when it is parked, without a step; infinite: it has taken one."""
        self._greenlet = greenlet(self._live)

    def load(self, models: Iterable[ModelSpec]) -> None:
        for model in models:
            self._change_models(partial(self.engine.load, model.name, model, gpus=self._gpus))

    def unload(self, model: str) -> None:
        self._change_models(partial(self.engine.unload, model))

    @property
    def now_s(self) -> float:
        return self._events.now_s

    def is_ready(self, instance_id: str) -> bool:
        return self.open

    @property
    def stats(self) -> EngineStats:
        """The stats that a dispatcher reads, up to `STATS_S` old."""
        if self._events.now_s >= self._stats_s + STATS_S:
            self._stats, self._stats_s = self.engine.turns_stats, self._events.now_s
        return self._stats

    def add(self, request: EngineRequest) -> None:
        """Add a request before the next step. It ends a fast-forward whose batch or turn it may change."""
        self._inbox.append(partial(self.engine.add, request))
        if self._parked:
            self._step_idle()
            self._parked = False
            self._sleep_number += 1
            self._events.at(self._events.now_s, END, self._wake, self._sleep_number)
        elif self._fast_forward and self._concerned(request) and self._fast_forward.cut(self._events.now_s):
            self._begin_fast_forward(self._fast_forward)

    def cancel(self, request_id: str) -> None:
        raise AssertionError("simulated clients do not cancel")

    def release(self, request_id: str) -> None:
        self.engine.release(request_id)

    def stop(self) -> None:
        """Stop for good."""
        self._sleep_number += 1
        self._parked, self._fast_forward = False, None

    def _change_models(self, change: Callable[[], None]) -> None:
        """Load or unload before the next step; at once where none runs."""
        if self._parked:
            change()
        else:
            self._inbox.append(change)

    def _concerned(self, request: EngineRequest) -> bool:
        """Whether a request may change the running batch or time slice: join it, be prefilled, or end a lone slice."""
        own = self.engine.is_present(request.instance_id)
        return own or request.kv is None or self.engine.lone_model is not None or self.engine.by_deadlines

    def _live(self) -> None:
        while True:
            for command in self._inbox:
                command()
            self._inbox.clear()
            if self.engine.has_work():
                began_s = self._events.now_s
                outputs = self.engine.step()
                self.busy_s += self._events.now_s - began_s
                if outputs or self.engine.batched_tokens_made:
                    self._on_step(self, outputs, self.engine.fast_forwarded)
            else:
                self._parked, self._idle_since_s = True, self._events.now_s
                self._greenlet.parent.switch()

    def _step_idle(self) -> None:
        """Take the step without work that a worker has taken by now, which ends the time slice. Nobody sees it before
        the next request comes.
        """
        if self._events.now_s >= self._idle_since_s + STATS_S:
            self._idle_since_s = math.inf
            self.engine.step()

    def _sleep(self, time_s: float) -> None:
        self._sleep_number += 1
        self._events.at(self._events.now_s + time_s, END, self._wake, self._sleep_number)
        self._greenlet.parent.switch()

    def _sleep_fast_forward(self, fast_forward: FastForward) -> FastForward:
        self._begin_fast_forward(fast_forward)
        self._greenlet.parent.switch()
        slept = self._fast_forward
        assert slept is not None
        self._fast_forward = None
        return slept

    def _begin_fast_forward(self, fast_forward: FastForward) -> None:
        """Set the wake-up to the end of a fast-forward; it replaces that of a longer one."""
        self._fast_forward = fast_forward
        self._sleep_number += 1
        ends_s = max(self._events.now_s, fast_forward.ended_s(fast_forward.steps))
        self._events.at(ends_s, END, self._wake, self._sleep_number)

    def _wake(self, number: int) -> None:
        if number == self._sleep_number:
            self._greenlet.switch()
