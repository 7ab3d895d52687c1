"""A model of a slot: its instances, its sequences with KV, and the cost of its steps. The same for every engine."""

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from dataplane.constraints.compiler import ConstraintCompiler
from dataplane.constraints.matcher import Matcher
from dataplane.engines.core.kv import DEVICE, KvT
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.interface import EngineRequest
from dataplane.protocol.answer_lengths import AnswerLengths
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Task
from dataplane.protocol.tiers import NIW
from dataplane.scheduling.costs import CostEstimate, StepWork
from dataplane.scheduling.decode import BatchFacts

_KEY = attrgetter("key")


@dataclass(eq=False, kw_only=True)
class ServedModel(ABC, Generic[KvT]):
    """One model. `instances`: those of the control plane that share it here, each with the name of its LoRA adapter,
    which is empty for the model itself. `begun`: its sequences that have KV at any
    location, in the order of service. `vocabulary` None accepts any token. `task`: what it answers with. `prefill_s`:
    recent mean of its prefill steps; None before the first. `load_order`: its position in the order of loading.
    `constraints`: compiles those of its requests; None: it follows none. `lengths`: of its answers.
    """

    name: str
    context_tokens: int
    vocabulary: int | None
    estimate: CostEstimate
    instances: dict[str, str] = field(default_factory=dict)
    begun: list[TokenSequence[KvT]] = field(default_factory=list)
    task: Task = "generate"
    prefill_s: float | None = None
    load_order: int = 0
    constraints: ConstraintCompiler | None = None
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    _decoding: list[TokenSequence[KvT]] | None = field(default=None, init=False)

    @property
    @abstractmethod
    def weights_bytes(self) -> int: ...

    @abstractmethod
    def new_kv(self, adapter: str) -> KvT:
        """That of a sequence with an adapter, empty for none. KV of different adapters has nothing in common."""

    def matcher(self, request: EngineRequest) -> Matcher | None:
        """Follows the answer to a request; None without a constraint.

        Raises:
            BadRequestError: the constraint cannot be compiled, or the model follows none.
        """
        if request.constraint is None:
            return None
        if self.constraints is None:
            raise BadRequestError(f"{self.name} follows no constraint", param="constraint")
        return self.constraints.matcher(request.constraint, prompt_tokens=len(request.prompt))

    def tokens_to_come(self, sequence: TokenSequence[KvT]) -> int:
        """Tokens of a sequence's answer that are still to be made, as far as can be expected."""
        return self.lengths.rest(sequence.generated, sequence.request.answer_tokens_max)

    def remaining_tokens(self, sequence: TokenSequence[KvT]) -> int:
        """Prompt tokens not yet prefilled, and tokens still to make."""
        return max(0, len(sequence.request.prompt) - sequence.cached) + self.tokens_to_come(sequence)

    @property
    def decoding(self) -> list[TokenSequence[KvT]]:
        """Its sequences past their prefill, in the order of service. A new list whenever they change."""
        if self._decoding is None:
            self._decoding = [sequence for sequence in self.begun if sequence.prefilled]
        return self._decoding

    @property
    def decoding_here(self) -> list[TokenSequence[KvT]]:
        """Those of them whose KV is on the device, so that they can be preempted."""
        return [s for s in self.begun if s.prefilled and s.kv.location is DEVICE]

    @property
    def half_prefilled(self) -> list[TokenSequence[KvT]]:
        """Partly prefilled sequences, in the order of service. Each has memory for its whole prompt."""
        return [s for s in self.begun if not s.prefilled and s.kv.location is DEVICE]

    def begin(self, sequence: TokenSequence[KvT]) -> None:
        sequence.begun = True
        insort(self.begun, sequence, key=_KEY)
        self._decoding = None

    def end_prefill(self, sequence: TokenSequence[KvT]) -> None:
        sequence.prefilled = True
        self._decoding = None

    def leave(self, sequence: TokenSequence[KvT]) -> None:
        sequence.begun = False
        self.begun.remove(sequence)
        self._decoding = None

    def observe_prefill(self, took_s: float, tokens: int, squared_tokens: int) -> None:
        """Update the estimate by a prefill step that waited for no weights."""
        self.estimate = self.estimate.observe_prefill(took_s, tokens, squared_tokens)
        self.prefill_s = recent(self.prefill_s, took_s)

    def observe_decode(self, took_s: float, context_tokens: int, batch: int) -> None:
        """Update the estimate by a decode step that waited for no weights."""
        self.estimate = self.estimate.observe_decode(took_s, context_tokens, batch)

    def observe_step(self, took_s: float, work: StepWork) -> None:
        """Update the estimate by a step that waited for no weights. One that prefilled and decoded changes neither the
        estimate of the one nor of the other, but that of mixed steps.
        """
        if not work.batch:
            self.observe_prefill(took_s, work.tokens, work.squared_tokens)
        elif not work.tokens:
            self.observe_decode(took_s, work.context_tokens, work.batch)
        else:
            self.estimate = self.estimate.observe_mixed(took_s, work)

    def batch_facts(
        self, *, now_s: float | None, switch_s: float, prefetched: bool, ready: bool, batch_max: int
    ) -> BatchFacts:
        """The facts for the decode scheduler; at least one sequence must be decoding. `now_s` None: without slack."""
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
            background=all(sequence.request.tier == NIW for sequence in batch),
        )


def recent(mean: float | None, value: float) -> float:
    """An exponentially weighted mean: the last value counts a quarter."""
    return value if mean is None else mean + 0.25 * (value - mean)
