"""The last time slices of a slot, and totals since the start."""

from collections import Counter, deque
from collections.abc import Sequence

from dataplane.engines.interface import SliceKind, TimeSlice
from dataplane.scheduling.pace import PrefillPace, SeenPrefills
from dataplane.scheduling.schedule import Turn

SLICES_KEPT = 256


class SliceLog:
    """The `slices` that ended, oldest first, and the totals since the start. A time slice is what the scheduler calls a
    turn, consecutive steps of one kind of one model, except that mixed steps are a kind of their own: a decode turn is
    cut where its steps begin and cease to prefill beside the batch. So the pace of prefills beside a batch is that of
    whole steps, as prompts behind them wait for these.
    """

    def __init__(self) -> None:
        self.switches_total = 0
        self.steps_total = 0
        self.tokens_total = 0
        self.prefix_query_tokens: Counter[str] = Counter()
        self.prefix_hit_tokens: Counter[str] = Counter()
        """By model: tokens of first prefills, and those of them that were taken over from the prefix cache."""
        self.slices: deque[TimeSlice] = deque(maxlen=SLICES_KEPT)
        self._prefills = SeenPrefills()
        """Those of `slices`."""
        self._prefilled: deque[tuple[int, int, float] | None] = deque(maxlen=SLICES_KEPT)
        """Of each of `slices`, what it says of prefills: prompts, their tokens, and seconds."""
        self._before_s: dict[str, float] = {}
        """By model: seconds of mixed slices since the last that completed a prompt: they prefilled pieces of it."""
        self._present: Turn | None = None
        self._kind: SliceKind = "decode"
        self._began_s = 0.0
        self._switched = False
        self._switch_s = 0.0
        self._model: str | None = None
        self._tokens_before = 0
        self._prompts = 0
        self._prompt_tokens = 0

    @property
    def prefill_pace(self) -> PrefillPace:
        """The prefill rate of the last time slices."""
        return self._prefills.pace

    def turn(self, turn: Turn | None, now_s: float, *, missing_s: float = 0.0, blocked: bool = False) -> None:
        """Record the turn of the next step, None if there is none. A time slice ends when the kind or model changes.
        `missing_s`: until the model's weights are loaded. `blocked`: a mixed turn found no memory for its prompts, so
        that it only decodes until one of its steps does.
        """
        present = self._present
        kind: SliceKind = "decode" if turn is None else "mixed" if turn.is_mixed and not blocked else turn.kind
        if present is not None:
            if turn is not None and (kind, turn.model) == (self._kind, present.model):
                return
            self._end(present, now_s)
        self._present, self._kind, self._began_s = turn, kind, now_s
        if turn is not None:
            self._switched = turn.model != self._model
            self._switch_s = missing_s if self._switched else 0.0
            self.switches_total += self._switched
            self._model = turn.model
            self._tokens_before = self.tokens_total
            self._prompts = self._prompt_tokens = 0

    def step(self, tokens: int, *, prompts: Sequence[int]) -> None:
        """Record a step, the tokens it made, and how many tokens of the prompts whose prefill it completed were
        computed.
        """
        self.steps_total += 1
        self.tokens_total += tokens
        self._prompts += len(prompts)
        self._prompt_tokens += sum(prompts)

    def prefix(self, model: str, tokens: int, *, hit: int) -> None:
        """Record the first prefill of a request of `tokens` tokens, of which `hit` were cached."""
        self.prefix_query_tokens[model] += tokens
        self.prefix_hit_tokens[model] += hit

    def _end(self, turn: Turn, now_s: float) -> None:
        slices, prefills, kind = self.slices, self._prefills, self._kind
        if len(slices) == SLICES_KEPT and (first := self._prefilled[0]) is not None:
            prefills.forget(*first, switched=slices[0].switched)
        record = TimeSlice(
            kind=kind,
            model=turn.model,
            started_s=self._began_s,
            ended_s=now_s,
            tokens=self._prompts if kind == "prefill" else self.tokens_total - self._tokens_before,
            prompts=self._prompts,
            prompt_tokens=self._prompt_tokens,
            switched=self._switched,
            switch_s=self._switch_s,
        )
        slices.append(record)
        prefilled = self._prefilled_by(record)
        self._prefilled.append(prefilled)
        if prefilled is not None:
            prefills.take(*prefilled, switched=record.switched)

    def _prefilled_by(self, record: TimeSlice) -> tuple[int, int, float] | None:
        """The prompts that a slice completed, their tokens, and the seconds that they took."""
        if record.kind == "decode":
            return None
        seconds = record.ended_s - record.started_s
        if record.kind == "mixed":
            seconds += self._before_s.pop(record.model, 0.0)
        if record.prompt_tokens:
            return record.prompts, record.prompt_tokens, seconds
        if record.kind == "mixed":
            self._before_s[record.model] = seconds
        return None
