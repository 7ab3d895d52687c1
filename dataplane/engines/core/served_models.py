"""A model of a slot as every engine keeps it: its instances, its sequences with KV, and what its steps cost."""

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from dataplane.engines.core.kv import KvLocation, KvT
from dataplane.engines.core.sequences import TokenSequence
from dataplane.scheduling.costs import CostEstimate
from dataplane.scheduling.decode import BatchFacts

_KEY = attrgetter("key")


@dataclass(eq=False, kw_only=True)
class ServedModel(ABC, Generic[KvT]):
    """One model. `instances`: those of the control plane that share it here. `begun`: its sequences that have KV
    somewhere, in the order of service. `vocabulary` None takes any token. `prefill_s`: how long its last prefill steps
    took; None before the first. `load_order`: its position in the order of loading.
    """

    name: str
    context_tokens: int
    vocabulary: int | None
    estimate: CostEstimate
    instances: set[str] = field(default_factory=set)
    begun: list[TokenSequence[KvT]] = field(default_factory=list)
    prefill_s: float | None = None
    load_order: int = 0
    _decoding: list[TokenSequence[KvT]] | None = field(default=None, init=False)

    @property
    @abstractmethod
    def weights_bytes(self) -> int:
        """The size of its weights."""

    @abstractmethod
    def new_kv(self) -> KvT:
        """The KV of a sequence that has none yet."""

    @property
    def decoding(self) -> list[TokenSequence[KvT]]:
        """Those past their prefill, in the order of service. Another list when they are others."""
        if self._decoding is None:
            self._decoding = [sequence for sequence in self.begun if sequence.prefilled]
        return self._decoding

    @property
    def decoding_here(self) -> list[TokenSequence[KvT]]:
        """Of those, the ones whose KV is on the slot and still: they can be asked to leave."""
        return [s for s in self.begun if s.prefilled and s.kv.location is KvLocation.DEVICE]

    @property
    def half_prefilled(self) -> list[TokenSequence[KvT]]:
        """Those in the midst of their prefill, in the order of service. Each holds room for all of its prompt."""
        return [s for s in self.begun if not s.prefilled and s.kv.location is KvLocation.DEVICE]

    def begin(self, sequence: TokenSequence[KvT]) -> None:
        """Take a sequence in that has KV now."""
        sequence.begun = True
        insort(self.begun, sequence, key=_KEY)
        self._decoding = None

    def end_prefill(self, sequence: TokenSequence[KvT]) -> None:
        """Let a sequence decode that has its first token."""
        sequence.prefilled = True
        self._decoding = None

    def leave(self, sequence: TokenSequence[KvT]) -> None:
        """Take a sequence out."""
        sequence.begun = False
        self.begun.remove(sequence)
        self._decoding = None

    def observe_prefill(self, took_s: float, tokens: int, squared_tokens: int) -> None:
        """Note how long a prefill step took whose weights were all there."""
        self.estimate = self.estimate.observe_prefill(took_s, tokens, squared_tokens)
        self.prefill_s = recent(self.prefill_s, took_s)

    def observe_decode(self, took_s: float, context_tokens: int, batch: int) -> None:
        """The same of a decode step."""
        self.estimate = self.estimate.observe_decode(took_s, context_tokens, batch)

    def batch_facts(
        self, *, now_s: float | None, switch_s: float, prefetched: bool, ready: bool, batch_max: int
    ) -> BatchFacts:
        """What the decode turns must know of it, at least one sequence of which decodes. `now_s` None: nobody asks for
        its slack.
        """
        batch = self.decoding[:batch_max]
        return BatchFacts(
            model=self.name,
            sequences=len(batch),
            step_s=self.estimate.decode_s(sum([sequence.cached for sequence in batch]), len(batch)),
            tbt_s=min([sequence.tbt_s for sequence in batch]),
            switch_s=switch_s,
            prefetched=prefetched,
            slack_s=0.0 if now_s is None else min([sequence.deadline_s for sequence in batch]) - now_s,
            ready=ready,
        )


def recent(mean: float | None, value: float) -> float:
    """The mean of the last values: each counts a quarter, those before it fade by the rest."""
    return value if mean is None else mean + 0.25 * (value - mean)
