"""What a slot's engine remembers of its turns: the last ones, and how much was done since the start."""

from collections import deque
from collections.abc import Sequence

from dataplane.engines.interface import TurnRecord
from dataplane.scheduling.pace import PrefillPace, SeenPrefills
from dataplane.scheduling.schedule import Turn

TURNS_KEPT = 256


class TurnLog:
    """The turns that ended, oldest first, and the present one; the totals since the start."""

    def __init__(self) -> None:
        self.switches_total = 0
        self.steps_total = 0
        self.tokens_total = 0
        self.turns: deque[TurnRecord] = deque(maxlen=TURNS_KEPT)
        self._prefills = SeenPrefills()
        """Of `turns`."""
        self._present: Turn | None = None
        self._switched = False
        self._model: str | None = None
        self._tokens_before = 0
        self._prompts = 0
        self._prompt_tokens = 0

    @property
    def prefill_pace(self) -> PrefillPace:
        """How fast the last turns prefilled."""
        return self._prefills.pace

    def turn(self, turn: Turn | None, now_s: float) -> None:
        """Note whose turn it is now, None when nobody's. A turn ends when the kind or the model changes."""
        present = self._present
        if present is not None:
            if turn is not None and (turn.kind, turn.model) == (present.kind, present.model):
                return
            self._end(present, now_s)
        self._present = turn
        if turn is not None:
            self._switched = turn.model != self._model
            self.switches_total += self._switched
            self._model = turn.model
            self._tokens_before = self.tokens_total
            self._prompts = self._prompt_tokens = 0

    def step(self, tokens: int, *, prompts: Sequence[int]) -> None:
        """Note a step that ran, how many tokens it made, and how long the prompts were that it ended."""
        self.steps_total += 1
        self.tokens_total += tokens
        self._prompts += len(prompts)
        self._prompt_tokens += sum(prompts)

    def _end(self, turn: Turn, now_s: float) -> None:
        """Write down a turn that is over; the oldest one may be forgotten for it."""
        turns, prefills = self.turns, self._prefills
        if len(turns) == TURNS_KEPT and turns[0].kind == "prefill" and turns[0].tokens:
            prefills.forget(*_prompts(turns[0]), switched=turns[0].switched)
        record = TurnRecord(
            kind=turn.kind,
            model=turn.model,
            started_s=turn.started_s,
            ended_s=now_s,
            tokens=self._prompts if turn.kind == "prefill" else self.tokens_total - self._tokens_before,
            prompt_tokens=self._prompt_tokens,
            switched=self._switched,
        )
        turns.append(record)
        if record.kind == "prefill" and record.tokens:
            prefills.take(*_prompts(record), switched=record.switched)


def _prompts(turn: TurnRecord) -> tuple[int, int, float]:
    """Those that a prefill turn ended, their tokens, and how long it took."""
    return turn.tokens, turn.prompt_tokens, turn.ended_s - turn.started_s
