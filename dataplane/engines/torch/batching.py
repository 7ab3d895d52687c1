"""Continuous batching of one instance: who runs in the next step, and with which KV blocks. No tensors here.

A sequence is *waiting* (holds no blocks) or *running* (holds blocks for all its tokens so far). `tokens` are its prompt
and what was generated; the first `cached` of them have keys and values in its blocks:

    tokens   | prompt ............... | generated .. |
    cached   | ..................|                        prefill: several tokens are pending
    cached   | .................................. |       decode: exactly the last token is pending

A step turns pending tokens into cached ones, and the last pending token's logits into one more token.
"""

from bisect import insort
from dataclasses import dataclass, field

from dataplane.engine import EngineRequest
from dataplane.memory.kv_cache import BlockPool, blocks_for
from dataplane.turns.schedule import TIER_RANKS


@dataclass(eq=False, kw_only=True)
class TokenSequence:
    """A request and how far it has come. `order`: place in the order of arrival; `added_s`: when it was added."""

    request: EngineRequest
    order: int
    added_s: float
    tokens: list[int] = field(init=False)
    cached: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start after what was generated before."""
        self.tokens = [*self.request.prompt, *self.request.generated]

    @property
    def key(self) -> tuple[int, int]:
        """The order of service: by tier, then first come, first served."""
        return TIER_RANKS[self.request.tier], self.order

    @property
    def pending(self) -> int:
        """Tokens without keys and values; at least 1 between steps."""
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        """Tokens made so far, here and elsewhere."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens not yet prefilled + tokens still to make."""
        return max(0, len(self.request.prompt) - self.cached) + self.request.max_tokens - self.generated


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next `count` pending tokens of a sequence, all of one step."""

    sequence: TokenSequence
    count: int

    @property
    def end(self) -> int:
        """How many tokens are cached after it."""
        return self.sequence.cached + self.count

    @property
    def makes_token(self) -> bool:
        """Whether nothing is pending after it, so that its last logits say what comes next."""
        return self.count == self.sequence.pending


class InstanceQueue:
    """The sequences of one instance and its pool of KV blocks."""

    def __init__(self, *, blocks: int, block_tokens: int, batch_max: int, prefill_tokens_max: int) -> None:
        self.pool = BlockPool(blocks)
        self.block_tokens = block_tokens
        self.preemptions_total = 0
        self._batch_max = batch_max
        self._prefill_tokens_max = prefill_tokens_max
        self._waiting: list[TokenSequence] = []
        self._running: list[TokenSequence] = []

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole KV cache holds."""
        return self.pool.blocks * self.block_tokens

    @property
    def waiting(self) -> tuple[TokenSequence, ...]:
        """Sequences without blocks, in the order of service."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[TokenSequence, ...]:
        """Sequences with blocks, in the order of service."""
        return tuple(self._running)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All of them, running ones first."""
        return (*self._running, *self._waiting)

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence that fits the cache when it is alone."""
        assert len(sequence.request.prompt) + sequence.request.max_tokens <= self.capacity_tokens
        insort(self._waiting, sequence, key=lambda waiting: waiting.key)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence and free its blocks."""
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._release(sequence)

    def plan_step(self) -> list[Chunk]:
        """The next step: one token of every decoding sequence, and prefill chunks up to the limit.

        Decodes come first in line for blocks. When none is free the last running sequence in the order of service
        gives up its own and waits again, to be computed anew later; then nobody is admitted in this step. The first
        in the order of service can thus always go on, which is why everybody finishes.
        """
        preemptions = self.preemptions_total
        decodes = self._plan_decodes()
        if self.preemptions_total == preemptions:
            self._admit()
        return decodes + self._plan_prefills({id(chunk.sequence) for chunk in decodes})

    def _plan_decodes(self) -> list[Chunk]:
        return [
            Chunk(sequence=sequence, count=1)
            for sequence in list(self._running)
            if sequence.pending == 1 and sequence in self._running and self._grow(sequence)
        ]

    def _plan_prefills(self, planned: set[int]) -> list[Chunk]:
        chunks = []
        room = self._prefill_tokens_max
        for sequence in self._running:
            if room > 0 and id(sequence) not in planned:
                chunks.append(Chunk(sequence=sequence, count=min(room, sequence.pending)))
                room -= chunks[-1].count
        return chunks

    def _grow(self, sequence: TokenSequence) -> bool:
        """Give it blocks for all its tokens; False when it was itself the one to give up its blocks."""
        missing = blocks_for(len(sequence.tokens), self.block_tokens) - len(sequence.blocks)
        while missing > self.pool.free_blocks:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(max(0, missing))
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        insort(self._waiting, sequence, key=lambda waiting: waiting.key)
        self.preemptions_total += 1

    def _admit(self) -> None:
        """Let waiting sequences in, strictly in order, while there are blocks for their tokens and one more."""
        while self._waiting and len(self._running) < self._batch_max:
            needed = blocks_for(len(self._waiting[0].tokens) + 1, self.block_tokens)
            if needed > self.pool.free_blocks:
                return
            sequence = self._waiting.pop(0)
            sequence.blocks = self.pool.allocate(needed)
            insort(self._running, sequence, key=lambda running: running.key)

    def _release(self, sequence: TokenSequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.cached = 0
