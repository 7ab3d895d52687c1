"""One model among those that share a slot: who waits, who decodes, and how long each token took."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, nan

from dataplane.engines.core.remapping.caps import ModelFacts
from dataplane.engines.core.remapping.circle import Rotation
from ops.bench.papers.remapping_models import SharedModel

PREFILL_SHARE = 0.2
"""What the last prefill counts in the usual one."""
FIRST_PROMPT_TOKENS = 200
"""The usual prompt, before there was one."""


@dataclass(eq=False, slots=True, kw_only=True)
class Ask:
    """A request. `made`: tokens so far, the last one at `last_s`; while it decodes, as of when it joined the batch,
    after `joined` steps of its model.
    """

    number: int
    arrived_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    made: int = 0
    first_s: float = nan
    last_s: float = nan
    joined: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV it has while it decodes: all but the last."""
        return self.prompt_tokens + self.made - 1

    @property
    def prefill_tokens(self) -> int:
        """Tokens that a prefill takes in: the prompt, and what was made before its KV was dropped."""
        return self.prompt_tokens + self.made


@dataclass(eq=False, kw_only=True)
class Tenant:
    """A model on the slot. `kv_tokens`: room that is taken: every context of its batch, and a prefill's."""

    model: SharedModel
    load_s: float
    waiting: deque[Ask] = field(default_factory=deque)
    batch: dict[int, Ask] = field(default_factory=dict)
    away: deque[Ask] = field(default_factory=deque)
    arriving: list[tuple[float, Ask]] = field(default_factory=list)
    """Whose KV comes back, and when it is there."""
    filling: deque[Ask] = field(default_factory=deque)
    """Whose prompt is being prefilled chunk by chunk; of the first, `filled_tokens` are."""
    filled_tokens: int = 0
    kv_tokens: int = 0
    steps: int = 0
    stepped_s: float = nan
    rotation: Rotation = field(init=False)
    loaded_s: float = -inf
    """When the last layer that it got back is there."""
    used_s: float = 0.0
    prefill_s: float = field(init=False)
    gaps_s: list[tuple[float, int]] = field(default_factory=list)
    """Times between tokens, and how many tokens had each."""
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _joined: list[Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        """All is there, and prefills take as long as one usually does."""
        self.rotation = Rotation(layers=self.model.layers)
        self.prefill_s = self.model.latency.prefill_s(FIRST_PROMPT_TOKENS, 0)

    @property
    def has_work(self) -> bool:
        """Whether it has requests."""
        return bool(self.waiting or self.batch or self.away or self.arriving or self.filling)

    @property
    def unfilled_tokens(self) -> int:
        """Tokens that are still to be prefilled of the prompts that were begun."""
        return sum(ask.prefill_tokens for ask in self.filling) - self.filled_tokens

    @property
    def kv_bytes(self) -> int:
        """What its KV takes."""
        return self.kv_tokens * self.model.kv_bytes_per_token

    @property
    def given_bytes(self) -> int:
        """What it has given up."""
        return self.rotation.given_up * self.model.layer_bytes

    @property
    def decode_s(self) -> float:
        """How long its next decode step computes."""
        return self.model.latency.decode_s(self.kv_tokens, max(len(self.batch), 1))

    @property
    def steps_to_end(self) -> int:
        """Steps until the first of its batch ends; the batch is not empty."""
        while self._ends[0][1] not in self.batch or self._last_step(self._ends[0][1]) != self._ends[0][0]:
            heappop(self._ends)
        return self._ends[0][0] - self.steps

    def facts(self, *, active: bool) -> ModelFacts:
        """For the remapping controller. Nobody has priority here."""
        return self.computing(self.decode_s if active else self.prefill_s, active=active)

    def computing(self, compute_s: float, *, active: bool = True) -> ModelFacts:
        """As `facts`, where its layers compute for so long."""
        return ModelFacts(
            model=self.model.name,
            layers=self.model.layers,
            layer_bytes=self.model.layer_bytes,
            load_s=self.load_s,
            compute_s=compute_s,
            active=active,
            given_up=self.rotation.given_up,
            used_s=self.used_s,
        )

    def join(self, ask: Ask) -> None:
        """Let a request whose KV is there decode from the next step on."""
        ask.joined = self.steps
        self.batch[ask.number] = ask
        self._joined.append(ask)
        heappush(self._ends, (self._last_step(ask.number), ask.number))

    def compute_s(self, tokens: Sequence[int], *, decodes: bool) -> float:
        """How long a step computes that prefills so many tokens of each prompt, or of all in one chunk, and decodes."""
        if not any(tokens):
            return self.decode_s
        prefill_s = self.model.latency.prefill_s(sum(tokens), sum(n * n for n in tokens))
        if decodes:
            prefill_s += self.decode_s - self.model.latency.prefill_base_s  # a pass over the weights serves both
        self.prefill_s += PREFILL_SHARE * (prefill_s - self.prefill_s)
        return prefill_s

    def fill(self, tokens: int) -> list[Ask]:
        """Prefill the next so many tokens; whose prompt is complete then."""
        done = []
        self.filled_tokens += tokens
        while self.filling and self.filled_tokens >= self.filling[0].prefill_tokens:
            self.filled_tokens -= self.filling[0].prefill_tokens
            done.append(self.filling.popleft())
        return done

    def prefilled(self, asks: list[Ask], now_s: float) -> None:
        """Prefills are over: each has made a token, the first or the next."""
        for ask in asks:
            if ask.made:
                self.gaps_s.append((now_s - ask.last_s, 1))
            else:
                ask.first_s = now_s
            ask.made += 1
            ask.last_s = now_s
            if ask.made < ask.output_tokens:
                self.join(ask)
            else:
                self.kv_tokens -= ask.context_tokens

    def decoded(self, now_s: float) -> None:
        """A step is over: every request of the batch has made a token, and some have ended."""
        self.steps += 1
        self.kv_tokens += len(self.batch)
        joined = [ask for ask in self._joined if ask.number in self.batch]
        self._joined.clear()
        for ask in joined:
            self.gaps_s.append((now_s - ask.last_s, 1))
        if len(self.batch) > len(joined):
            self.gaps_s.append((now_s - self.stepped_s, len(self.batch) - len(joined)))
        self.stepped_s = now_s
        while self.batch and self.steps_to_end == 0:
            ask = self.leave(self._ends[0][1])
            self.kv_tokens -= ask.context_tokens

    def leave(self, number: int) -> Ask:
        """Take a request out of the batch, with what it has made. Its KV is still counted."""
        ask = self.batch.pop(number)
        if self.steps > ask.joined:
            ask.made += self.steps - ask.joined
            ask.last_s = self.stepped_s
        return ask

    def _last_step(self, number: int) -> int:
        ask = self.batch[number]
        return ask.joined + ask.output_tokens - ask.made
