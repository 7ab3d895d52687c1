"""A dedicated instance: one model on a slot of its own, with continuous batching. Time comes from its latency model.

What it does next is asked of the live slot's policies wherever there is a choice: `choose_group` says in which order
prompts are prefilled, and `settle_shares` whether one goes before the batch: where there is one model and nothing to
switch, that is all there is to a turn. Where only one thing can be done it is done unasked.

    waiting --prefill (several prompts, or a piece of one)--> batch --leaps--> ended
                                                              |    ^
                                                  no room for KV   room, after a transfer
                                                              v    |
                                                              away (host memory, which has no limit here)

Two simplifications: KV that leaves makes room at once, and no prompt is begun while KV waits to come back.
"""

from bisect import insort
from collections.abc import Callable, Iterable

from dataplane.turns.schedule import Kind as TurnKind
from dataplane.turns.schedule import settle_shares
from ops.simulator.batch import Batch, Sequence
from ops.simulator.costs import InstanceSettings, ModelCosts
from ops.simulator.events import END, Events
from ops.simulator.leaps import Leap
from ops.simulator.prompts import Prompts
from ops.simulator.requests import Request, Served

_ANY = 2**62

Chunks = list[tuple[Sequence, int]]
"""Of a prefill step: sequences, and how many tokens of each."""


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
        self._order = 0
        self._over_s = self._prefill_spent_s = self._decode_spent_s = 0.0
        self._owed: TurnKind | None = None
        """The turn policy's account of shares."""
        self._leap: Leap | None = None
        self._chunks: Chunks = []
        """What runs, if anything does: a leap of decode steps, or a prefill step."""
        self._begun = 0
        """How often work was begun, or cut."""

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._leap is None and not self._chunks

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
        request = served.request
        self._order += 1
        self._prompts.new.append(Sequence(served=served, order=self._order))
        self.remaining_tokens += request.prompt_tokens + request.output_tokens
        self._cut_or_begin()

    def adopt(self, served: Served) -> None:
        """Take in a request whose KV another instance has made: it comes as KV that was away."""
        assert self.fits(served.request)
        assert served.made
        self._order += 1
        tokens = served.request.prompt_tokens + served.made - 1
        insort(self._away, Sequence(served=served, order=self._order, cached=tokens), key=lambda one: one.key)
        self.remaining_tokens += served.left
        self._bring_back()

    def _cut_or_begin(self) -> None:
        """Something has come: end the leap with the step that runs now, or begin where nothing runs."""
        if self._leap is not None:
            self._cut(self._leap)
        elif not self._chunks:
            self._take_in()
            self._next()

    def _cut(self, leap: Leap) -> None:
        if leap.steps > 1:
            steps = leap.pace.steps_to(self._events.now_s - leap.started_s)
            if steps < leap.steps:
                self._decode(Leap(leap.started_s, leap.pace, steps))

    def _decode(self, leap: Leap) -> None:
        """Begin a leap, or what is left of it."""
        self._leap = leap
        self._begun += 1
        took_s = leap.pace.seconds(leap.steps)
        events = self._events
        events.at(max(events.now_s, leap.started_s + took_s), END, self._decoded, self._begun, took_s)

    def _prefill(self, chunks: Chunks) -> None:
        """Begin a prefill step."""
        tokens = squared = 0
        for sequence, count in chunks:
            tokens += count
            squared += (sequence.cached + count) ** 2 - sequence.cached**2
        took_s = self.model.latency.prefill_s(tokens, squared)
        self._chunks = chunks
        self._events.at(self._events.now_s + took_s, END, self._prefilled, took_s)

    def _decoded(self, begun: int, took_s: float) -> None:
        """A leap is over, unless it was cut meanwhile."""
        leap = self._leap
        if leap is None or begun != self._begun:
            return
        self._leap = None
        self.busy_s += took_s
        self.remaining_tokens -= leap.steps * self._batch.size
        self._account(leap, took_s)
        for sequence in self._batch.advance(leap):
            self._ended(sequence.served)
        self._take_in()
        self._next()

    def _account(self, leap: Leap, took_s: float) -> None:
        """Tell the turn policy what time the batch took. It is asked before every step; where steps were taken
        unasked and a prompt came in the last one, it is asked once for all of those before.
        """
        if self._prompts.new and leap.steps > 1:
            before_s = leap.pace.seconds(leap.steps - 1)
            self._decode_spent_s += before_s
            self._settle(prefill=False, decode=True)
            self._decode_spent_s += took_s - before_s
        else:
            self._decode_spent_s += took_s

    def _settle(self, *, prefill: bool, decode: bool) -> None:
        """Let the turn policy settle its account, knowing which kinds wait."""
        self._over_s, self._owed = settle_shares(
            self._over_s,
            self._owed,
            prefill_spent_s=self._prefill_spent_s,
            decode_spent_s=self._decode_spent_s,
            prefill=prefill,
            decode=decode,
            settings=self._settings.turns,
        )
        self._prefill_spent_s = self._decode_spent_s = 0.0

    def _prefilled(self, took_s: float) -> None:
        now_s, chunks, self._chunks = self._events.now_s, self._chunks, []
        self.busy_s += took_s
        self._prefill_spent_s += took_s
        for sequence, count in chunks:
            served = sequence.served
            sequence.cached += count
            self.remaining_tokens -= count
            if sequence.cached == served.request.prompt_tokens:
                self._prompts.remove(sequence)
                self._reserved_tokens -= sequence.cached + 1
                self.remaining_tokens -= 1
                served.token(now_s)
                left = served.left
                if left and not self._settings.hands_over:
                    self._batch.join(sequence)
                else:
                    self.remaining_tokens -= left
                    self._ended(served)
        self._take_in()
        self._next()

    def _take_in(self) -> None:
        """Between two steps: what came meanwhile joins in, and what is away may come back."""
        if self._prompts.new:
            self._prompts.take_in(self._events.now_s)
        if self._arrived:
            self._join_arrived()
        if self._away:
            self._bring_back()

    def _bring_back(self) -> None:
        """Send for KV that is away, in the order of service, while there is room."""
        while self._away and self.kv_tokens + self._away[0].cached + 1 <= self.kv_tokens_max:
            sequence = self._away.pop(0)
            self._reserved_tokens += sequence.cached + 1
            took_s = sequence.cached * self.model.kv_bytes_per_token / self.model.bytes_per_s
            self._events.at(self._events.now_s + took_s, END, self._back, sequence)

    def _back(self, sequence: Sequence) -> None:
        """KV has arrived: it decodes after the step that runs."""
        self._arrived.append(sequence)
        self._cut_or_begin()

    def _join_arrived(self) -> None:
        for sequence in self._arrived:
            self._reserved_tokens -= sequence.cached + 1
            self._batch.join(sequence)
        self._arrived.clear()

    def _next(self) -> None:
        """Begin what is to be done now, if anything is."""
        batch, chunks, steps_max = self._batch, [], _ANY
        if self._prompts.waiting and not self._away and batch.size < self._settings.batch_max:
            if self._prefill_goes_first():
                chunks = self._take(self._prompts.first_group(self._events.now_s)) or self._take(self._prompts.begun)
            else:
                steps_max = 1
        elif batch.size and self._over_s + self._prefill_spent_s >= self._settings.turns.burst_s:
            self._settle(prefill=False, decode=True)  # the batch may have to catch up
        if not chunks:
            steps = self._steps_after_making_room()
            if steps:
                self._decode(Leap(self._events.now_s, batch.pace, min(steps, steps_max)))
                return
            chunks = self._take(self._prompts.begun)
        if chunks:
            self._prefill(chunks)

    def _steps_after_making_room(self) -> int:
        """How many steps the batch can take, at least one; 0 if it is empty."""
        while self._batch.size:
            steps = self._batch.steps_max(self._reserved_tokens)
            if steps >= 1:
                return steps
            self.driven_out_total += 1
            insort(self._away, self._batch.drive_out(self._events.now_s), key=lambda sequence: sequence.key)
        return 0

    def _prefill_goes_first(self) -> bool:
        """Whether what waits goes before the batch, if there is one."""
        if self._settings.batching == "prefill-first":
            return True
        self._settle(prefill=True, decode=self._batch.size > 0)
        return self._owed != "decode"

    def _take(self, group: Iterable[Sequence]) -> Chunks:
        """As many of the group's tokens, in order, as one step takes and KV has room for; the last prompt in part."""
        chunks: Chunks = []
        tokens, places = self._settings.prefill_tokens_per_step_max, self._settings.batch_max - self._batch.size
        free_tokens = self.kv_tokens_max - self.kv_tokens
        for sequence in group:
            whole = sequence.served.request.prompt_tokens
            if tokens <= 0 or len(chunks) == places:
                break
            if not sequence.cached:
                if whole >= free_tokens:  # with the token to come
                    break
                free_tokens -= whole + 1
                self._reserved_tokens += whole + 1
            count = min(tokens, whole - sequence.cached)
            chunks.append((sequence, count))
            tokens -= count
        return chunks
