"""The live slot's replay engine, taking many decode steps at once where nothing can change in between.

Everything a slot does (time slices, switches, prefetching, KV transfers, preemption) is the engine's own. The sequences
of a time slice decode in one fast-forward until the first of:

- a sequence's last token, or the end of free KV memory: then the engine must decide again;
- the end of the model's time slice, or by deadlines the end of a load of a model whose prompts wait. In rounds a slice
  has no end here if its model is alone: live, it is renewed whenever its short quantum is used up, and a new request
  waits for the rest of it. Here none waits, unless `renews` is set, at the price of short fast-forwards;
- the end of a transfer, or a new request: the fast-forward ends with the step that runs then.

The slot goes step by step while prompts wait that the scheduling policy weighs before each step (in rounds all of them,
by deadlines those of loaded models), and while layers are offloaded. Sequences past their prefill are batched
(`fast_forward_models`); whenever KV memory might run out, the batches are dissolved, and the live rules of preemption
apply. A batched sequence has no output before its last token: until then the slot that prefilled it keeps its KV, which
takes host memory only, and that has no limit here.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from dataplane.engines.core.kv import DEVICE, HOST
from dataplane.engines.core.slot_engine import Made
from dataplane.engines.interface import EngineStats, PoolStats
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.replay.kv import SequenceKv
from dataplane.engines.replay.models import Answers, ReplayModel, ReplaySequence, adapters_of, replayed
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.prefill import PrefillQueue
from dataplane.scheduling.schedule import SlotFacts, SlotState, Turn, choose_turn, settled_shares
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.servers.fast_forward_models import FastForwardModel, ServedOf

Waits = tuple[
    ReplaySettings, Callable[[], float], Callable[[float], None], Callable[[FastForward], FastForward], ServedOf
]
"""An engine's settings, its clock, how it sleeps and waits for a fast-forward, and the records of requests."""


class _Silent(Answers):
    """Answers whose tokens are not read."""

    def next_token(self, sequence: ReplaySequence) -> int | None:
        return 0


class FastForwardEngine(ReplayEngine):
    """The replay engine with fast-forwards.

    Args:
        fast_forward: waits for the steps of a fast-forward, and returns the steps that were taken: perhaps fewer.
        served: the record of a request by its id.
        answers: what answers have to come, by model.
        renews: whether a lone time slice ends with its quantum, as live.

    Attributes:
        fast_forwarded: the decode steps of the last `step`; None if it made no tokens that way.
        batched_tokens_made: tokens of batched sequences in it, recorded in `served`; only the last token of each
            sequence is an output.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        fast_forward: Callable[[FastForward], FastForward],
        served: ServedOf,
        *,
        answers: AnswersByModel,
        renews: bool = False,
    ) -> None:
        super().__init__(settings, clock, sleep)
        self._answers = _Silent(settings.vocabulary_size, None)
        self._fast_forward = fast_forward
        self._served = served
        self._answers_by_model = answers
        self._renews = renews
        self._may_lend = settings.kv_pressure in ("auto", "remap")
        self._batched_models: dict[str, FastForwardModel] = {}
        self.fast_forwarded: FastForward | None = None
        self.batched_tokens_made = 0

    @property
    def begun(self) -> set[str]:
        """Ids of requests whose prefill has begun; `stats` counts the others as waiting."""
        return {sequence.request.request_id for sequence in self.requests if sequence.cached}

    @property
    def switches_total(self) -> int:
        return self._log.switches_total

    @property
    def turns_stats(self) -> EngineStats:
        """The stats that a dispatcher reads: the running model, and the pace of prefills."""
        turn, pace = self.state.turn, self._log.prefill_pace
        pool = PoolStats(now_s=self._clock(), running_model=turn.model if turn else None, prefill_pace=pace)
        return EngineStats(pool=pool)

    @property
    def kv_used_bytes(self) -> int:
        return self.kv.used_bytes

    @property
    def kv_capacity_bytes(self) -> int:
        """KV memory in use and free."""
        return self.kv.used_bytes + self.kv.free_bytes

    @property
    def lone_model(self) -> str | None:
        """The scheduled model if no other batch can run; then a new request is scheduled at once."""
        return self._last_model if self._alone else None

    @property
    def by_deadlines(self) -> bool:
        """Whether time slices follow deadlines; then any new request may end one."""
        return self._by_deadlines

    def is_present(self, instance_id: str) -> bool:
        """Whether an instance is of the model that ran last, or of an adapter of it."""
        model = self._model_of.get(instance_id)
        return model is not None and model.name == self._last_model

    @property
    def _alone(self) -> bool:
        batches = self._batches
        return len(batches) < 2 or sum([batch.can_run for batch in batches]) < 2

    def batched_made(self, model: str) -> dict[int, int]:
        """How many tokens each batched request of a model and its adapters has made, by the number of the request."""
        batched = self._batched_models.get(model)
        return {} if batched is None else batched.batched_made

    def _new_model(self, spec: ModelSpec, gpus: int) -> FastForwardModel:
        model = replayed(FastForwardModel, spec, self._settings, gpus)
        model.answers = self._answers_by_model[spec.name]
        return model

    def _facts(self, now_s: float) -> SlotFacts:
        """The turn policy is asked before every step. Where prompts came in the last step of a fast-forward, it is
        asked now for those before, so that it knows for how long there were none.
        """
        if self.requests.prefills.groups:
            self._dissolve_batches()
        facts, fast_forward = super()._facts(now_s), self.fast_forwarded
        if fast_forward and fast_forward.steps > 1 and facts.prefills.groups:
            last_s = fast_forward.seconds(fast_forward.steps) - fast_forward.seconds(fast_forward.steps - 1)
            state = replace(self.state, decode_spent_s=self.state.decode_spent_s - last_s)
            if self._by_deadlines or now_s - last_s < state.round.ends_s:  # the slice went on, whatever has ended since
                state = self._settled(state)
            else:
                alone = replace(facts, prefills=PrefillQueue())
                _, state = choose_turn(alone, state, now_s - last_s, self._slot.turns)
            self.state = state.spent("decode", last_s)
        return facts

    def _settled(self, state: SlotState) -> SlotState:
        """The state after steps of a batch without prompts of its own model."""
        over_s, owed = settled_shares(state, self._slot.turns, prefill=False, decode=True)
        return replace(state, over_s=over_s, owed=owed, prefill_spent_s=0.0, decode_spent_s=0.0)

    def _run(self, turn: Turn, model: ReplayModel, now_s: float) -> Made[SequenceKv] | None:
        assert isinstance(model, FastForwardModel)
        self.fast_forwarded, self.batched_tokens_made = None, 0
        if turn.kind == "prefill":
            return super()._run(turn, model, now_s)
        if turn.is_mixed or self._steps_singly(model):
            self._dissolve_batches()
            return super()._run(turn, model, now_s)
        there_s = self._steps.load_weights(turn, model, now_s)
        if there_s is None:
            return None
        singles = self._ready(model)
        if there_s > now_s:
            self._steps.sleep_until(there_s)
            return []
        if not singles and not model.batched:
            self._steps.wait(now_s)
            return None
        return self._decode(model, singles, now_s)

    def _wait(self, now_s: float) -> None:
        self.fast_forwarded, self.batched_tokens_made = None, 0
        super()._wait(now_s)

    def _steps_singly(self, model: FastForwardModel) -> bool:
        """Whether layers are offloaded, or may be in this step: then each step waits for its own loads."""
        if not self._may_lend:
            return False
        model.look()
        lends = self.weights.offloaded or self.kv.out_of_region_bytes
        return bool(lends) or model.kv_needed_bytes() > self.kv.free_bytes

    def _ready(self, model: FastForwardModel) -> list[ReplaySequence]:
        """Allocate KV for one step. Returns the unbatched sequences with KV."""
        model.look()
        if len(model.decoding) > self._slot.batch_max or model.kv_needed_bytes() > self.kv.free_bytes:
            self._dissolve_batches()
            return [chunk.sequence for chunk in self._step_batches.decode(model)]
        if not model.has_next_kv:
            self.kv.grow_unseen(len(model.batched) * model.kv_bytes_per_token)
            model.has_next_kv = True
        unbatched, model.unbatched = model.unbatched, []
        for sequence in unbatched:
            kv = sequence.kv
            if kv.location is DEVICE:
                self.kv.grow(kv, len(sequence.tokens))
                model.join_batch(sequence, self._served(sequence.request.request_id))
                continue
            if kv.location is HOST:
                self._allocator.swap_in(sequence, ())
            model.unbatched.append(sequence)
        if model.batched:
            self._batched_models[model.name] = model
        return []

    def _decode(self, model: FastForwardModel, singles: list[ReplaySequence], now_s: float) -> Made[SequenceKv]:
        """Run a fast-forward of all ready sequences."""
        batched = len(model.batched)
        batch = batched + len(singles)
        context_tokens = model.batched_tokens + (sum([one.cached for one in singles]) if singles else 0)
        first_s, growth_s = model.latency.decode_pace_s(context_tokens, batch)
        adapters = adapters_of((*model.batched.values(), *singles)) if self._adapters else 0
        factor = self._settings.adapters_factor(adapters)
        steps_max = self._steps_max(model, singles, batch)
        fast_forward = FastForward(now_s, factor * first_s, factor * growth_s, steps_max)
        ends_s = self._ends_s()
        if ends_s < math.inf:
            fast_forward.cut(ends_s)
        self.fast_forwarded = self._fast_forward(fast_forward)
        steps = self.fast_forwarded.steps
        self._step_batches.stuck.discard(model.name)
        if steps > 1:
            self.weights.load(model.weights, now_s)  # each step uses them; those longest unused give way
            last_s = model.estimate.decode_s(context_tokens + (steps - 1) * batch, batch)  # the load is as of this one
            self._batches = tuple(
                [replace(one, step_s=last_s) if one.model == model.name else one for one in self._batches]
            )
        over = []
        if batched:
            self.batched_tokens_made = batched * steps
            self.kv.grow_unseen(batched * (steps - 1) * model.kv_bytes_per_token)
            over = model.advance_batch(self.fast_forwarded)
        for sequence in singles:
            sequence.cached += steps
            sequence.tokens.extend([0] * (steps - 1))
            grown = self.kv.grow(sequence.kv, len(sequence.tokens))
            assert grown, "there is room for the fast-forward"
        outputs = singles + over
        if len(outputs) > 1:
            outputs.sort(key=lambda sequence: sequence.key)
        self._log.steps_total += steps - 1
        self._log.tokens_total += steps * batch - len(outputs)
        return [(sequence, 0, None) for sequence in outputs]

    def _steps_max(self, model: FastForwardModel, singles: list[ReplaySequence], batch: int) -> int:
        """The number of steps until a sequence ends, or KV memory does; one while prompts wait."""
        if self._waits_for_prefill(model):
            return 1
        steps = min(model.steps_max(), 1 + self.kv.free_bytes // (batch * model.kv_bytes_per_token))
        for one in singles:
            steps = min(steps, one.request.max_tokens - one.generated)
        return steps

    def _waits_for_prefill(self, model: FastForwardModel) -> bool:
        """Whether a prompt waits that the policy weighs before each step. By deadlines it does so for loaded models;
        those that are not, and those whose load ends, take part in when the time slice ends.
        """
        groups = self.requests.prefills.groups
        if not self._by_deadlines or self._hold:
            return bool(groups)
        now_s = self._clock()
        return any(
            group.model == model.name or not self._missing_s(self.models[group.model], now_s) for group in groups
        )

    def _ends_s(self) -> float:
        """When the time slice or a transfer ends; infinite: none does."""
        ends_s = math.inf if self._alone and not (self._renews or self._by_deadlines) else self.state.round.ends_s
        if self._by_deadlines:
            now_s = self._clock()
            for group in self.requests.prefills.groups:
                ends_s = min(ends_s, now_s + self._missing_s(self.models[group.model], now_s))
        move_s = self.kv.next_move_s
        return ends_s if move_s is None or ends_s < move_s else move_s

    def _dissolve_batches(self) -> None:
        for model in self._batched_models.values():
            model.dissolve_batch()
        self._batched_models.clear()
