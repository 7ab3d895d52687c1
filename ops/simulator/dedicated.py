"""A dedicated instance: one model on a slot of its own, with continuous batching. Time comes from its latency model.

What it does next is asked of the live slot's policies wherever there is a choice: `choose_turn` says whether a prefill
or the batch goes first and in which order prompts are prefilled. Where only one thing can be done it is done unasked.

    waiting --prefill (several prompts, or a piece of one)--> batch --leaps--> ended
                                                              |    ^
                                                  no room for KV   room, after a transfer
                                                              v    |
                                                              away (host memory, which has no limit here)

Two simplifications: KV that leaves makes room at once, and no prompt is begun while KV waits to come back.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dataplane.turns.decode import BatchFacts
from dataplane.turns.schedule import Kind as TurnKind
from dataplane.turns.schedule import SlotFacts, SlotState, choose_turn
from ops.simulator.batch import Batch, Sequence
from ops.simulator.costs import InstanceSettings, ModelCosts
from ops.simulator.events import Events, Kind
from ops.simulator.leaps import Leap
from ops.simulator.prompts import Prompts
from ops.simulator.requests import Request, Served

_ANY = 2**62


@dataclass(frozen=True, slots=True)
class _Work:
    """What runs until `ends_s`: a leap of decode steps, or a prefill step: sequences and how many tokens of each."""

    leap: Leap | None
    chunks: tuple[tuple[Sequence, int], ...]
    ends_s: float


class Instance:
    """Serves. `ended` is told of each request when its last token is out, or it is handed over."""

    def __init__(
        self, model: ModelCosts, settings: InstanceSettings, events: Events, ended: Callable[[Served], None]
    ) -> None:
        self.model = model
        self.kv_tokens_max = settings.kv_bytes // model.kv_bytes_per_token
        self.busy_s = 0.0
        self.driven_out_total = 0
        self.remaining_tokens = 0
        """Prompt tokens and tokens to make, as of the last event."""
        self._settings = settings
        self._events = events
        self._ended = ended
        self._batch = Batch(model.latency, self.kv_tokens_max)
        self._prompts = Prompts(model, settings.turns.prefill)
        self._reserved_tokens = 0
        self._away: list[Sequence] = []
        self._arrived: list[Sequence] = []
        self._state = SlotState()
        self._order = 0
        self._work: _Work | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._work is None

    @property
    def kv_tokens(self) -> int:
        """Room that is taken, as of the last event."""
        return self._batch.kv_tokens + self._reserved_tokens

    @property
    def prefill_wait_s(self) -> float:
        """Seconds that the prompts which wait will take."""
        return self._prompts.load_s

    def fits(self, request: Request) -> bool:
        """Whether a request could ever be served here."""
        return request.prompt_tokens + request.output_tokens <= self.kv_tokens_max

    def submit(self, served: Served) -> None:
        """Take in a request that fits. A leap that runs ends with the step it is in."""
        assert self.fits(served.request)
        self._order += 1
        self._prompts.add(Sequence(served=served, order=self._order))
        self.remaining_tokens += served.request.prompt_tokens + served.request.output_tokens
        if self._work is None:
            self._prompts.queue_new(self._events.now_s)
            self._next()
        else:
            self._cut()

    def adopt(self, served: Served) -> None:
        """Take in a request whose KV another instance has made: it comes as KV that was away."""
        assert self.fits(served.request)
        assert served.made
        self._order += 1
        tokens = served.request.prompt_tokens + served.made - 1
        insort(self._away, Sequence(served=served, order=self._order, cached=tokens), key=lambda one: one.key)
        self.remaining_tokens += served.left
        self._bring_back()

    def _cut(self) -> None:
        """End the leap with the step that runs now."""
        work, now_s = self._work, self._events.now_s
        if work is None or work.leap is None:
            return
        leap = work.leap
        steps = leap.pace.steps_to(now_s - leap.started_s)
        if steps < leap.steps:
            self._begin(leap=Leap(leap.started_s, leap.pace, steps))

    def _begin(
        self, *, leap: Leap | None = None, chunks: tuple[tuple[Sequence, int], ...] = (), took_s: float = 0
    ) -> None:
        now_s = self._events.now_s
        ends_s = max(now_s, leap.ended_s(leap.steps)) if leap else now_s + took_s
        work = self._work = _Work(leap, chunks, ends_s)
        self._events.at(ends_s, Kind.END, partial(self._over, work))

    def _over(self, work: _Work) -> None:
        """What ran is over, unless it was cut meanwhile."""
        if self._work is not work:
            return
        self._work = None
        if work.leap:
            self._decoded(work.leap)
        else:
            self._prefilled(work)
        self._prompts.queue_new(self._events.now_s)
        self._join_arrived()
        self._bring_back()
        self._next()

    def _decoded(self, leap: Leap) -> None:
        took_s = leap.pace.seconds(leap.steps)
        self.busy_s += took_s
        self.remaining_tokens -= leap.steps * len(self._batch)
        if self._settings.batching == "turns":
            self._account(leap, took_s)
        for sequence in self._batch.advance(leap):
            self._ended(sequence.served)

    def _account(self, leap: Leap, took_s: float) -> None:
        """Tell the turn policy what time the batch took. It is asked before every step; where steps were taken
        unasked and a prompt came in the last one, it is asked once for all of those before.
        """
        if self._prompts.has_new and leap.steps > 1:
            before_s = leap.pace.seconds(leap.steps - 1)
            self._state = self._state.spent("decode", before_s)
            self._ask_alone(leap.started_s + before_s)
            self._state = self._state.spent("decode", took_s - before_s)
        else:
            self._state = self._state.spent("decode", took_s)

    def _ask_alone(self, now_s: float) -> None:
        """Let the turn policy note that the batch goes on alone."""
        alone = SlotFacts(batches=(self._batch_facts(),), running_model=self.model.name)
        _, self._state = choose_turn(alone, self._state, now_s, self._settings.turns)

    def _prefilled(self, work: _Work) -> None:
        now_s = self._events.now_s
        took_s = self._prefill_step_s(work.chunks)
        self.busy_s += took_s
        if self._settings.batching == "turns":
            self._state = self._state.spent("prefill", took_s)
        for sequence, count in work.chunks:
            sequence.cached += count
            self.remaining_tokens -= count
            if sequence.cached == sequence.served.request.prompt_tokens:
                self._prompts.remove(sequence)
                self._reserved_tokens -= sequence.cached + 1
                self.remaining_tokens -= 1
                sequence.served.token(now_s)
                if sequence.served.left and not self._settings.hands_over:
                    self._batch.join(sequence)
                else:
                    self.remaining_tokens -= sequence.served.left
                    self._ended(sequence.served)

    def _bring_back(self) -> None:
        """Send for KV that is away, in the order of service, while there is room."""
        while self._away and self.kv_tokens + self._away[0].cached + 1 <= self.kv_tokens_max:
            sequence = self._away.pop(0)
            self._reserved_tokens += sequence.cached + 1
            took_s = sequence.cached * self.model.kv_bytes_per_token / self.model.bytes_per_s
            self._events.at(self._events.now_s + took_s, Kind.END, partial(self._back, sequence))

    def _back(self, sequence: Sequence) -> None:
        """KV has arrived: it decodes after the step that runs."""
        self._arrived.append(sequence)
        if self._work is None:
            self._join_arrived()
            self._next()
        else:
            self._cut()

    def _join_arrived(self) -> None:
        for sequence in self._arrived:
            self._reserved_tokens -= sequence.cached + 1
            self._batch.join(sequence)
        self._arrived.clear()

    def _next(self) -> None:
        """Begin what is to be done now, if anything is."""
        kind, group, steps_max = self._choose()
        chunks = (self._take(group) or self._take(self._prompts.begun)) if kind == "prefill" else ()
        if not chunks:
            self._make_room()
        if not chunks and not len(self._batch):
            chunks = self._take(self._prompts.begun)
        if chunks:
            self._begin(chunks=chunks, took_s=self._prefill_step_s(chunks))
        elif len(self._batch):
            steps = min(steps_max, self._batch.steps_max(self._reserved_tokens))
            self._begin(leap=Leap(self._events.now_s, self._batch.pace, steps))

    def _make_room(self) -> None:
        """See to it that the batch can take a step, or is empty."""
        while len(self._batch) and self._batch.steps_max(self._reserved_tokens) < 1:
            self.driven_out_total += 1
            insort(self._away, self._batch.drive_out(self._events.now_s), key=lambda sequence: sequence.key)

    def _choose(self) -> tuple[TurnKind, tuple[str, ...], int]:
        """Which kind goes first, the prompts in order, and for how many steps the batch may go on unasked."""
        decoding = len(self._batch)
        now_s, turns, state = self._events.now_s, self._settings.turns, self._state
        if not self._prompts.queue.groups or self._away or decoding >= self._settings.batch_max:
            if decoding and state.over_s + state.prefill_spent_s >= turns.burst_s:  # the batch may have to catch up
                self._ask_alone(now_s)
            return "decode", (), _ANY
        if self._settings.batching == "prefill-first":
            return "prefill", self._prompts.first_group(now_s), _ANY
        facts = SlotFacts(
            prefills=self._prompts.queue,
            batches=(self._batch_facts(),) if decoding else (),
            running_model=self.model.name,
        )
        turn, self._state = choose_turn(facts, state, now_s, turns)
        assert turn is not None, "a prompt waits"
        return turn.kind, turn.group, 1 if turn.kind == "decode" else _ANY

    def _batch_facts(self) -> BatchFacts:
        """Of the only model: no switch, so that nobody asks for its slack."""
        return BatchFacts(
            model=self.model.name,
            sequences=len(self._batch),
            step_s=self._batch.pace.first_s,
            tbt_s=self._batch.tbt_s,
            switch_s=0.0,
        )

    def _take(self, group: tuple[str, ...]) -> tuple[tuple[Sequence, int], ...]:
        """As many of the group's tokens, in order, as one step takes and KV has room for; the last prompt in part."""
        chunks = []
        tokens = self._settings.prefill_tokens_per_step_max
        for sequence in self._prompts.find(group[: self._settings.batch_max - len(self._batch)]):
            whole = sequence.served.request.prompt_tokens
            if tokens <= 0 or (not sequence.cached and self.kv_tokens + whole + 1 > self.kv_tokens_max):
                break
            if not sequence.cached:
                self._reserved_tokens += whole + 1
            chunks.append((sequence, min(tokens, whole - sequence.cached)))
            tokens -= chunks[-1][1]
        return tuple(chunks)

    def _prefill_step_s(self, chunks: tuple[tuple[Sequence, int], ...]) -> float:
        tokens = sum(count for _, count in chunks)
        squared = sum((sequence.cached + count) ** 2 - sequence.cached**2 for sequence, count in chunks)
        return self.model.latency.prefill_s(tokens, squared)
