"""A dedicated instance: one model on a slot of its own, with continuous batching. Time comes from its latency model.

What it does next is asked of the live slot's policies wherever there is a choice: `choose_group` says in which order
prompts are prefilled, and `settle_shares` whether one goes before the batch: where there is one model and nothing to
switch, that is all there is to a turn. Where only one thing can be done it is done unasked. With `mixed_batches`, a
step may do both, by the live slot's rule 4.

    waiting --prefill (several prompts, or a piece of one)--> batch --fast-forwards--> ended
                                                              |    ^
                                                  no room for KV   room, after a transfer
                                                              v    |
                                                              away (host memory, which has no limit here)

It has a clock of its own and is advanced lazily. Simplifications: KV that is swapped out frees its memory at once; no
prompt is begun while swapped KV waits to be loaded; blocks that several running requests share count for each of them;
and a prefill waits for its blocks that come from host memory.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from math import inf

from dataplane.engines.replay.prefixes import CachedBlocks
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.costs import CostEstimate
from dataplane.scheduling.decode import BatchFacts
from dataplane.scheduling.mixed_batches import MixedStepFacts, Prompt, choose_prefill_tokens, keeps_up, step_budget_s
from dataplane.scheduling.schedule import Kind as TurnKind
from dataplane.scheduling.schedule import settle_shares
from ops.simulator.kernel.answers import Answers
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import BLOCK_TOKENS, Request, Sequence, Served
from ops.simulator.servers.batch import Batch
from ops.simulator.servers.prompts import Prompts

_ANY = 2**62


class Instance:
    """One instance. `ended` is called for each request with its last token, or the first if it is handed over.
    `next_s`: the next end of a step or of a load; infinite: there is none. All else is as of the last `advance`.
    """

    def __init__(
        self, model: ModelCosts, settings: InstanceSettings, answers: Answers, ended: Callable[[Served], None]
    ) -> None:
        self.model = model
        self.kv_tokens_max = settings.kv_bytes // model.kv_bytes_per_token
        self.batch_max = settings.batch_max
        self.busy_s = 0.0
        self.next_s = inf
        self._prompt_tokens = 0
        """To prefill."""
        self._settings = settings
        self._answers = answers
        block_bytes = BLOCK_TOKENS * model.kv_bytes_per_token
        self._prefixes = CachedBlocks()
        self._host_blocks = settings.prefix_host_bytes // block_bytes
        self._block_s = block_bytes / model.bytes_per_s
        self._weighs = settings.batching == "turns"
        """Whether the turn policy is asked."""
        self._ended = ended
        self._batch = Batch(model.latency, self.kv_tokens_max)
        self._prompts = Prompts(model, settings.turns.prefill)
        self._reserved_tokens = 0
        self._away: list[Sequence] = []
        self._arriving: list[tuple[float, Sequence]] = []
        self._arrived: list[Sequence] = []
        self._order = 0
        self._over_s = self._prefill_spent_s = self._decode_spent_s = 0.0
        self._owed: TurnKind | None = None
        """The turn policy's account of shares."""
        self._fast_forward: FastForward | None = None
        self._chunks: list[tuple[Sequence, int]] = []
        """What runs, if anything does: a fast-forward of decode steps, or a prefill step of sequences and how many
        tokens of each; a mixed step is both.
        """
        self._takes_s = 0.0
        self._over_at_s = inf
        """How long that takes, and when it is over."""
        self._arrives_s = inf
        """When KV arrives next."""

    @property
    def kv_tokens(self) -> int:
        """KV in use or reserved."""
        return self._batch.kv_tokens + self._reserved_tokens

    @property
    def requests(self) -> int:
        """All requests in flight."""
        prompts = len(self._prompts.waiting) + len(self._prompts.new)
        return prompts + self._batch.size + len(self._away) + len(self._arriving) + len(self._arrived)

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens to prefill, and the tokens that answers have to come."""
        if self.next_s == inf:
            return 0  # nothing runs, so there is no request
        answers = self._answers
        others = [answers.rest(one.served.made, one.served.left) for one in self._unbatched]
        return self._prompt_tokens + answers.rests(self._batch) + sum(others)

    @property
    def waiting(self) -> list[Served]:
        """Requests whose prefill has not begun, ordered by arrival."""
        begun = [sequence for sequence, _ in self._chunks]
        prompts = [*self._prompts.waiting.values(), *self._prompts.new]
        return [one.served for one in prompts if not one.cached and one not in begun]

    @property
    def inside(self) -> list[Served]:
        """All requests in flight, ordered by arrival."""
        return [one.served for one in sorted([*self._unbatched, *self._batch], key=lambda one: one.order)]

    @property
    def _unbatched(self) -> list[Sequence]:
        """Prompts, and sequences whose KV is swapped out or being loaded."""
        prompts = [*self._prompts.waiting.values(), *self._prompts.new]
        return [*prompts, *self._away, *self._arrived, *(sequence for _, sequence in self._arriving)]

    def prefill_wait_s(self, tier: Tier, now_s: float) -> float:
        """Prefill time of the waiting prompts that one of the tier arriving now could not overtake."""
        return self._prompts.wait_s(tier, now_s)

    def fits(self, request: Request) -> bool:
        return request.prompt_tokens + request.output_tokens <= self.kv_tokens_max

    def submit(self, served: Served, now_s: float) -> None:
        """Queue a request that fits. It ends a running fast-forward with the present step."""
        if self.next_s <= now_s:
            self.advance(now_s)
        request = served.request
        self._order += 1
        expected = 0
        if request.blocks:
            self._make_room()
            expected = BLOCK_TOKENS * self._prefixes.find(request.reusable)
        self._prompts.new.append(Sequence(served, self._order, expected=expected))
        self._prompt_tokens += request.prompt_tokens - expected
        self._cut_or_begin(now_s)

    def withdraw(self, served: Served) -> bool:
        """Take back a request. False: its prefill has begun."""
        if served not in self.waiting:
            return False
        sequence = self._prompts.take_back(served)
        self._prompt_tokens -= served.request.prompt_tokens - sequence.expected
        return True

    def adopt(self, served: Served, now_s: float) -> None:
        """Queue a request that another instance has prefilled, as if its KV had been swapped out here."""
        assert self.fits(served.request)
        assert served.made
        self.advance(now_s)
        self._order += 1
        tokens = served.request.prompt_tokens + served.made - 1
        insort(self._away, Sequence(served, self._order, cached=tokens), key=lambda one: one.key)
        self._bring_back(now_s)

    def advance(self, now_s: float) -> None:
        """Simulate up to a moment."""
        while (at_s := self.next_s) <= now_s:
            if self._arrives_s < self._over_at_s:
                self._arrive()
                continue
            self.busy_s += self._takes_s
            fast_forward = self._fast_forward
            if fast_forward is None:
                self._prefill_spent_s += self._takes_s
            elif not self._chunks:
                self._spend(fast_forward)
            if fast_forward is not None:
                self._decoded(fast_forward, at_s)
            if self._chunks:
                self._prefilled(at_s)
            self._go_on(at_s)

    def _cut_or_begin(self, now_s: float) -> None:
        """End the running fast-forward with the present step, or begin a step if none runs."""
        fast_forward = self._fast_forward
        if fast_forward is None:
            if not self._chunks:
                self._go_on(now_s)
        elif fast_forward.cut(now_s):
            self._decode(fast_forward, now_s)

    def _go_on(self, now_s: float) -> None:
        """Between two steps: admit what arrived, load swapped KV if it fits, and begin the next step."""
        prompts, batch, steps_max = self._prompts, self._batch, _ANY
        self._take_in(now_s)
        if prompts.waiting and not self._away and batch.size < self._settings.batch_max:
            if self._weighs:
                self._settle(prefill=True, decode=batch.size > 0)
            if self._weighs and self._is_mixed(now_s):
                if self._mix(now_s):
                    return
            elif self._owed == "decode":
                steps_max = 1
            elif self._prefill(prompts.first_group(now_s), now_s) or self._prefill(prompts.begun, now_s):
                return
        elif self._weighs and batch.size and self._over_s + self._prefill_spent_s >= self._settings.turns.burst_s:
            self._settle(prefill=False, decode=True)  # the batch may have to catch up
        fast_forward = self._next_steps(now_s, steps_max)
        if fast_forward is not None:
            self._decode(fast_forward, now_s)
        elif not self._prefill(prompts.begun, now_s):
            self._run_until(inf)

    def _take_in(self, now_s: float) -> None:
        """Take in prompts and KV that came during the last step."""
        self._fast_forward = None
        if self._prompts.new:
            self._prompts.take_in(now_s)
        if self._arrived:
            self._join_arrived()
        if self._away:
            self._bring_back(now_s)

    def _next_steps(self, now_s: float, steps_max: int) -> FastForward | None:
        """The next steps of the batch. As long as KV has no room for its next tokens, a sequence is driven out."""
        batch = self._batch
        fast_forward = batch.fast_forward(now_s, steps_max, self._reserved_tokens)
        while fast_forward is None and batch.size:
            driven_out = batch.drive_out(now_s)
            self._let_go(driven_out)
            insort(self._away, driven_out, key=lambda sequence: sequence.key)
            fast_forward = batch.fast_forward(now_s, steps_max, self._reserved_tokens)
        return fast_forward

    def _decode(self, fast_forward: FastForward, now_s: float) -> None:
        """Begin a fast-forward, or the rest of one."""
        self._fast_forward = fast_forward
        self._takes_s = takes_s = fast_forward.seconds(fast_forward.steps)
        over_at_s = fast_forward.started_s + takes_s
        self._run_until(over_at_s if over_at_s > now_s else now_s)

    def _run_until(self, over_at_s: float) -> None:
        """Set the end of what runs; infinite: nothing runs."""
        self._over_at_s = over_at_s
        self.next_s = over_at_s if over_at_s < self._arrives_s else self._arrives_s

    def _spend(self, fast_forward: FastForward) -> None:
        """Account for a fast-forward. The turn policy is asked before every step; where steps were taken unasked and a
        prompt came in the last one, it is asked once for all of those before.
        """
        takes_s = self._takes_s
        if self._prompts.new and self._weighs and fast_forward.steps > 1:
            before_s = fast_forward.seconds(fast_forward.steps - 1)
            self._decode_spent_s += before_s
            self._settle(prefill=False, decode=True)
            self._decode_spent_s += takes_s - before_s
        else:
            self._decode_spent_s += takes_s

    def _decoded(self, fast_forward: FastForward, now_s: float) -> None:
        """End a fast-forward."""
        for sequence in self._batch.advance(fast_forward, now_s):
            if sequence.held:
                self._let_go(sequence)
            self._ended(sequence.served)

    def _settle(self, *, prefill: bool, decode: bool) -> None:
        """Let the scheduling policy settle its account of shares, knowing which kinds wait."""
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

    def _prefilled(self, now_s: float) -> None:
        """End a prefill step, or that part of a mixed one."""
        chunks, self._chunks = self._chunks, []
        for sequence, count in chunks:
            served = sequence.served
            sequence.cached += count
            self._prompt_tokens -= count
            request = served.request
            if sequence.cached == request.prompt_tokens:
                self._prompts.remove(sequence)
                self._reserved_tokens -= sequence.cached + 1
                if request.blocks:
                    self._keep(sequence)
                served.token(now_s)
                if served.made < request.output_tokens and not self._settings.prefill_only:
                    self._batch.join(sequence)
                else:
                    self._let_go(sequence)
                    self._ended(served)

    def _bring_back(self, now_s: float) -> None:
        """Load swapped KV, in the order of service, while it fits."""
        while self._away and self.kv_tokens + self._away[0].cached + 1 <= self.kv_tokens_max:
            sequence = self._away.pop(0)
            self._reserved_tokens += sequence.cached + 1
            takes_s = sequence.cached * self.model.kv_bytes_per_token / self.model.bytes_per_s
            insort(self._arriving, (now_s + takes_s, sequence), key=lambda one: one[0])
            self._arrives_s = self._arriving[0][0]
        self._run_until(self._over_at_s)

    def _arrive(self) -> None:
        """End a load of KV: the sequence joins the batch between two steps."""
        at_s, sequence = self._arriving.pop(0)
        self._arrived.append(sequence)
        self._arrives_s = self._arriving[0][0] if self._arriving else inf
        self._run_until(self._over_at_s)
        self._cut_or_begin(at_s)

    def _join_arrived(self) -> None:
        for sequence in self._arrived:
            self._reserved_tokens -= sequence.cached + 1
            self._batch.join(sequence)
        self._arrived.clear()

    def _is_mixed(self, now_s: float) -> bool:
        """Whether prompts are prefilled beside the batch: rule 4 of the turn policy for a model without others."""
        batch, turns = self._batch, self._settings.turns
        if not turns.mixed_batches or not batch.size:
            return False
        step_s, budget_s = self._step_budget_s()
        if budget_s <= step_s:
            return False
        due_s, takes_s = self._prompts.soonest
        return keeps_up(budget_s, step_s, turns.prefill_share) or due_s - takes_s - turns.near_s > now_s

    def _step_budget_s(self) -> tuple[float, float]:
        """How long the next step of the batch takes by itself, and may take."""
        batch, name = self._batch, self.model.name
        step_s = self.model.latency.decode_s(batch.context_tokens, batch.size)
        facts = BatchFacts(model=name, sequences=batch.size, step_s=step_s, tbt_s=batch.tbt_s, switch_s=0.0)
        return step_s, step_budget_s([facts], name, alpha=0.0)

    def _mix(self, now_s: float) -> bool:
        """Begin a mixed step. False: KV has no room for the batch's next tokens, or for a prompt."""
        batch, latency = self._batch, self.model.latency
        if batch.steps_max(self._reserved_tokens) < 1:
            return False
        group = list(self._prompts.first_group(now_s))
        facts = MixedStepFacts(
            prompts=tuple([Prompt(one.cached, one.served.request.prompt_tokens - one.cached) for one in group]),
            budget_s=self._step_budget_s()[1],
            estimate=CostEstimate(latency=latency),
            context_tokens=batch.context_tokens,
            batch=batch.size,
            tokens_max=self._settings.prefill_tokens_per_step_max,
        )
        most = choose_prefill_tokens(facts)
        tokens, squared, fetched = self._take_chunks(group, most)
        if not self._chunks:
            tokens, squared, fetched = self._take_chunks(self._prompts.begun, most)
        if not self._chunks:
            return False
        takes_s = latency.mixed_s(tokens, squared, batch.context_tokens, batch.size) + fetched * self._block_s
        self._decode(FastForward(now_s, takes_s, 0.0, 1), now_s)
        return True

    def _prefill(self, group: Iterable[Sequence], now_s: float) -> bool:
        """Begin to prefill as many of the group's tokens, in order, as one step takes and KV has room for; the last
        prompt in part. False: there is nothing of it to do.
        """
        tokens, squared, fetched = self._take_chunks(group, self._settings.prefill_tokens_per_step_max)
        if not self._chunks:
            return False
        takes_s = self.model.latency.prefill_s(tokens, squared)
        self._takes_s = takes_s = takes_s + fetched * self._block_s if fetched else takes_s
        self._run_until(now_s + takes_s)
        return True

    def _take_chunks(self, group: Iterable[Sequence], most: int) -> tuple[int, int, int]:
        """Set the chunks of a step that prefills at most so many tokens. Returns its tokens, the growth of their
        squared lengths, and how many blocks it takes from host memory.
        """
        chunks: list[tuple[Sequence, int]] = []
        batch = self._batch
        places = self._settings.batch_max - batch.size
        free_tokens = self.kv_tokens_max - batch.context_tokens - batch.size - self._reserved_tokens
        tokens = squared = fetched = 0
        for sequence in group:
            whole, cached = sequence.served.request.prompt_tokens, sequence.cached
            if tokens >= most or len(chunks) == places:
                break
            if not cached:
                if whole >= free_tokens:  # with the token to come
                    break
                free_tokens -= whole + 1
                self._reserved_tokens += whole + 1
                if sequence.served.request.blocks:
                    fetched += self._take_over(sequence)
                    cached = sequence.cached
            count = min(most - tokens, whole - cached)
            chunks.append((sequence, count))
            tokens += count
            squared += count * (count + 2 * cached)
        self._chunks = chunks
        return tokens, squared, fetched

    def _take_over(self, sequence: Sequence) -> int:
        """Begin a prompt with the blocks that are cached; returns how many of them come from host memory."""
        self._make_room()
        served = sequence.served
        held, fetched = self._prefixes.take(served.request.reusable)
        sequence.held = served.request.reusable[:held]
        sequence.cached = served.cached = held * BLOCK_TOKENS
        self._prompt_tokens -= sequence.cached - sequence.expected
        return fetched

    def _keep(self, sequence: Sequence) -> None:
        """Cache the blocks of a prompt that has been computed."""
        request = sequence.served.request
        whole = request.blocks[: request.prompt_tokens // BLOCK_TOKENS]
        self._prefixes.add(whole[len(sequence.held) :])
        sequence.held = whole

    def _let_go(self, sequence: Sequence) -> None:
        """The cache may evict the blocks of a sequence that leaves the batch."""
        if sequence.held:
            self._prefixes.release(sequence.held)
            sequence.held = ()

    def _make_room(self) -> None:
        """Evict blocks that nobody uses from memory that sequences have taken."""
        self._prefixes.evict((self.kv_tokens_max - self.kv_tokens) // BLOCK_TOKENS, self._host_blocks)
