"""The live slot's replay engine, taking many decode steps at once where nothing could change in between.

Everything a slot does (turns, switches, prefetching, KV in and out, preemption) is the engine's own. After one decode
step as ever, the same sequences go on in a leap until the first of:

- a sequence's last token, or KV memory running out: then the engine must look again;
- the end of the model's turn, unless it is alone: live, a lone turn is renewed whenever its short quota is used up, and
  who comes waits for the rest of it. Here nobody waits, unless `renews` asks for that, at the price of short leaps;
- a transfer that is over, or somebody from outside: the leap ends with the step that runs then.

While prompts wait on the slot it goes step by step, since the turn policy weighs them before each.
"""

from collections.abc import Callable
from dataclasses import replace

from dataplane.engine import EngineStats, PoolStats
from dataplane.engines.replay import ReplayEngine, ReplaySettings
from dataplane.engines.replay_memory import SequenceKv
from dataplane.engines.replay_models import Answers, ReplayModel, ReplaySequence
from dataplane.engines.slot_engine import Made
from dataplane.turns.prefill import PrefillQueue
from dataplane.turns.schedule import SlotFacts, Turn, choose_turn
from ops.simulator.leaps import Leap, decode_pace


class _Silent(Answers):
    """Tokens that nobody reads."""

    def next_token(self, sequence: ReplaySequence) -> int | None:
        """Always the same."""
        return 0


class LeapEngine(ReplayEngine):
    """`leap` waits for the steps of a leap and says how many it was. `leaped`: all decode steps of the last `step`;
    None if it made no tokens that way.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        leap: Callable[[Leap], int],
        *,
        renews: bool = False,
    ) -> None:
        super().__init__(settings, clock, sleep)
        self._answers = _Silent(settings.vocabulary_size, None)
        self._leap = leap
        self._renews = renews
        self.leaped: Leap | None = None

    @property
    def switches_total(self) -> int:
        """Switches since the start."""
        return self._log.switches_total

    @property
    def turns_stats(self) -> EngineStats:
        """Of its stats what a dispatcher reads: whose turn it is, and the last turns."""
        turn = self._state.turn
        pool = PoolStats(now_s=self._clock(), running_model=turn.model if turn else None, turns=tuple(self._log.turns))
        return EngineStats(pool=pool)

    @property
    def kv_used_bytes(self) -> int:
        """The slot's memory that KV takes."""
        return self._kv.used_bytes

    @property
    def lone_model(self) -> str | None:
        """Whose turn it is, when nobody else's batch can run; then who comes gets the next turn at once."""
        return self._last_model if self._alone else None

    @property
    def present_model(self) -> str | None:
        """Whose turn it is."""
        return self._last_model

    @property
    def _alone(self) -> bool:
        return sum(batch.can_run for batch in self._batches) <= 1

    def _facts(self, now_s: float) -> SlotFacts:
        """The turn policy is asked before every step. Where prompts came in the last step of a leap, it is asked now
        for those before, so that it knows for how long there were none.
        """
        facts, leap = super()._facts(now_s), self.leaped
        if leap and leap.steps > 1 and facts.prefills.groups:
            last_s = leap.pace.seconds(leap.steps) - leap.pace.seconds(leap.steps - 1)
            state = replace(self._state, decode_spent_s=self._state.decode_spent_s - last_s)
            alone = replace(facts, prefills=PrefillQueue())
            _, state = choose_turn(alone, state, now_s - last_s, self._slot.turns)
            self._state = state.spent("decode", last_s)
        return facts

    def _run(self, turn: Turn, model: ReplayModel, now_s: float) -> Made[SequenceKv] | None:
        self.leaped = None
        made = super()._run(turn, model, now_s)
        if turn.kind == "prefill" or not made:
            return made
        context_tokens = sum(sequence.cached - 1 for sequence, _ in made)
        pace = decode_pace(model.latency, context_tokens, len(made))
        more = self._steps_more(made, now_s, Leap(now_s, pace, 1))
        if more:
            self._weights.bring(model.weights, self._clock())  # each step uses them; those longest unused give way
            after = decode_pace(model.latency, context_tokens + len(made), len(made))
            more = self._leap(Leap(self._clock(), after, more))
        self._take_steps(made, more, model)
        self.leaped = Leap(now_s, pace, 1 + more)
        return made

    def _steps_more(self, made: Made[SequenceKv], now_s: float, first: Leap) -> int:
        """How many steps may follow the first one unasked."""
        if self._requests.prefills.groups:
            return 0
        tokens_bytes = sum(sequence.kv.bytes_per_token for sequence, _ in made)
        more = min(sequence.request.max_tokens - sequence.generated - 1 for sequence, _ in made)
        more = min(more, self._kv.free_bytes // tokens_bytes)
        ends_s = [] if self._alone and not self._renews else [self._state.round.ends_s]
        if self._kv.next_move_s is not None:
            ends_s.append(self._kv.next_move_s)
        if ends_s:
            left_s = min(ends_s) - now_s
            more = min(more, first.pace.steps_to(left_s) - 1)
        return max(0, more)

    def _take_steps(self, made: Made[SequenceKv], more: int, model: ReplayModel) -> None:
        """Write down the tokens of the leap; the engine takes the last one itself."""
        if not more:
            return
        for sequence, _ in made:
            sequence.tokens.extend([0] * more)
            sequence.cached += more
            grown = self._kv.grow(sequence.kv, len(sequence.tokens))
            assert grown, "there is room for the leap"
        self._log.steps_total += more
        self._log.tokens_total += more * len(made)
