"""What the slots of a pool did when, and with which requests, for reports of where time goes.

A logged slot is a `FastForwardEngine` that notes how long its steps took, and decides nothing by it: the events of a
run are the same with a log and without.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dataplane.engines.core.kv import SWAPPING_IN, SWAPPING_OUT
from dataplane.engines.core.slot_engine import Made
from dataplane.engines.interface import EngineOutput
from dataplane.engines.replay.kv import SequenceKv
from dataplane.engines.replay.models import ReplayModel, ReplaySequence
from dataplane.scheduling.schedule import Turn
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.requests import Served
from ops.simulator.servers.fast_forward_engine import FastForwardEngine, Waits
from ops.simulator.servers.fast_forward_models import FastForwardModel

Activity = Literal["prefill", "decode", "weights", "kv"]
"""Of a slot: steps of either kind (a mixed step is a decode step), a wait for weights, a wait for KV with nothing to
compute.
"""


@dataclass(kw_only=True)
class Switch:
    """A slot's change to another model. `waited_s`: for its weights, until it could run or gave way to another."""

    model: str
    waited_s: float = 0.0


@dataclass(kw_only=True)
class RequestTimes:
    """Seconds of a request in steps before its first token and after it, and of its KV in transfers between memories,
    waits for the link included. `arrived_s`, `first_s`, `last_s`: its arrival and its first and last token, once it
    has ended.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_s: float = 0.0
    arrived_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended: bool = False

    @property
    def prefill_wait_s(self) -> float:
        """From its arrival to its first token, but for the steps with its prompt."""
        return self.first_s - self.arrived_s - self.prefill_s

    @property
    def decode_wait_s(self) -> float:
        """From its first token to its last, but for the steps with it and for transfers of its KV."""
        return self.last_s - self.first_s - self.decode_s - self.kv_s


@dataclass(kw_only=True)
class PoolLog:
    """`slots`: seconds by activity of each slot. `requests`: by number."""

    slots: list[dict[Activity, float]] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    requests: defaultdict[int, RequestTimes] = field(default_factory=lambda: defaultdict(RequestTimes))

    def new_slot(self) -> dict[Activity, float]:
        """The seconds of one more slot."""
        self.slots.append({"prefill": 0.0, "decode": 0.0, "weights": 0.0, "kv": 0.0})
        return self.slots[-1]

    def ended(self, served: Served) -> None:
        """Note a request whose last token was made."""
        times = self.requests[served.request.number]
        times.arrived_s, times.first_s, times.last_s = served.request.arrived_s, served.first_s, served.last_s
        times.ended = True


class LoggedEngine(FastForwardEngine):
    """A slot's engine that notes what it does in a log."""

    def __init__(
        self,
        *waits: *Waits,
        answers: AnswersByModel,
        renews: bool = False,
        log: PoolLog,
    ) -> None:
        super().__init__(*waits, answers=answers, renews=renews)
        self._notes = log
        self._seconds = log.new_slot()
        self._ran_s = 0.0
        self._switch: Switch | None = None
        self._decoded: Sequence[ReplaySequence] = ()
        """Those in the fast-forward of the present step."""
        self._moves: dict[str, float] = {}
        """The end of the last noted transfer of KV, by request."""

    def step(self) -> list[EngineOutput]:
        """See `Engine.step`. What a step takes beyond its turn is a wait for KV."""
        began_s, self._ran_s = self._clock(), 0.0
        outputs = super().step()
        self._seconds["kv"] += self._clock() - began_s - self._ran_s
        self._note_moves(began_s)
        return outputs

    def _run(self, turn: Turn, model: ReplayModel, now_s: float) -> Made[SequenceKv] | None:
        if self._switch is None or model.name != self._switch.model:
            self._switch = Switch(model=model.name)
            self._notes.switches.append(self._switch)
        switch = self._switch
        missing_s, self._decoded = self._missing_s(model, now_s), ()
        before = [(one, one.cached) for one in (*self.requests.find(turn.group), *model.decoding)]
        made = super()._run(turn, model, now_s)
        self._ran_s = took_s = self._clock() - now_s
        if made is None:
            self._seconds["kv"] += took_s
        elif missing_s > 0:
            self._seconds["weights"] += took_s
            switch.waited_s += took_s
        else:
            self._seconds[turn.kind] += took_s
            stepped = self._decoded or [one for one, cached in before if one.cached != cached]
            self._note_steps(stepped, took_s)
        return made

    def _decode(self, model: FastForwardModel, singles: list[ReplaySequence], now_s: float) -> Made[SequenceKv]:
        self._decoded = [*model.batched.values(), *singles]
        return super()._decode(model, singles, now_s)

    def _note_steps(self, sequences: Sequence[ReplaySequence], took_s: float) -> None:
        for sequence in sequences:
            times = self._notes.requests[int(sequence.request.request_id)]
            if sequence.prefilled:
                times.decode_s += took_s
            elif not sequence.generated:  # a prefill after that computes again what was made: the request waits for it
                times.prefill_s += took_s

    def _note_moves(self, began_s: float) -> None:
        """Note the transfers of KV that the step has begun: at its end those of KV that was exported, all others at its
        beginning. One that waits for another slot's transfer, which is noted there, begins when that ends.
        """
        now_s = self._clock()
        for sequence in self.requests:
            self._note_move(sequence.request.request_id, sequence.kv, began_s)
        for name, kv in self.requests.exported.items():
            self._note_move(name, kv, now_s)

    def _note_move(self, name: str, kv: SequenceKv, began_s: float) -> None:
        if kv.location in (SWAPPING_IN, SWAPPING_OUT) and self._moves.get(name) != kv.moved_s:
            self._moves[name] = kv.moved_s
            self._notes.requests[int(name)].kv_s += kv.moved_s - max(began_s, kv.source_s)
