"""What one step runs: as many of a turn's sequences as memory allows, and how many tokens of each."""

from collections.abc import Callable, Sequence
from typing import Generic

from dataplane.engines.core.kv import DEVICE, HOST, SWAPPING_IN, KvMemory, KvT
from dataplane.engines.core.kv_allocator import KvAllocator
from dataplane.engines.core.sequences import Chunk, TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.scheduling.costs import StepWork
from dataplane.scheduling.mixed_batches import MixedStepFacts, Prompt, choose_prefill_tokens
from dataplane.scheduling.schedule import Turn
from dataplane.scheduling.swaps import pays_off


class StepBatches(Generic[KvT]):
    """Forms step batches of at most `batch_max` decoding sequences, `prefill_tokens_max` tokens to prefill, or both."""

    def __init__(
        self,
        allocator: KvAllocator[KvT],
        kv: KvMemory[KvT],
        *,
        batch_max: int,
        prefill_tokens_max: int,
        left_s: Callable[[], float],
    ) -> None:
        """`left_s`: seconds until the present time slice ends, in which KV may come in at the cost of other models'."""
        self._left_s = left_s
        self._allocator = allocator
        self._kv = kv
        self._batch_max = batch_max
        self._prefill_tokens_max = prefill_tokens_max
        self.blocked: set[str] = set()
        """Models whose prompts found no memory beside their batch in the last mixed step."""
        self.stuck: set[str] = set()
        """Models whose batch found no memory for any of it, and gave KV of it back, or none was being freed; until one
        of it decodes.
        """
        self.gave_back = False
        """Whether the present step found no memory for any of its batch, and gave KV of it back."""

    def form(self, turn: Turn, model: ServedModel[KvT], group: Sequence[TokenSequence[KvT]]) -> list[Chunk[KvT]]:
        """What the turn's next step runs; empty if there is no memory for anything of it. `group`: the turn's."""
        if turn.kind == "prefill":
            return self.prefill(group, model)
        chunks = self.decode(model)
        if not group:
            return chunks
        return self._with_prompts(turn, model, group, chunks) if chunks else self.prefill(group, model)

    def _with_prompts(
        self,
        turn: Turn,
        model: ServedModel[KvT],
        group: Sequence[TokenSequence[KvT]],
        batch: list[Chunk[KvT]],
    ) -> list[Chunk[KvT]]:
        """A mixed step: the batch, and what is prefilled beside it. Of what decodes, of any model, only a lower tier is
        preempted for it: prompts wait for memory until they are nearly due.
        """
        first = dict.fromkeys([one for sequence in group if (one := self._first_for(sequence)) is not None])
        facts = MixedStepFacts(
            prompts=tuple([Prompt(sequence.cached, sequence.pending) for sequence in first or group]),
            budget_s=turn.budget_s,
            estimate=model.estimate,
            context_tokens=sum([chunk.sequence.cached for chunk in batch]),
            batch=len(batch),
            tokens_max=self._prefill_tokens_max,
            sharers=turn.sharers,
        )
        rank = min([sequence.key[0] for sequence in group])
        keep = [sequence for sequence in self._allocator.decoding if sequence.key[0] <= rank]
        tokens = choose_prefill_tokens(facts)
        self.blocked.discard(model.name)
        chunks = self._prefill(group, tokens, keep) or self._prefill(model.half_prefilled, tokens, keep)
        return [chunk for chunk in batch if chunk.sequence.kv.location is DEVICE] + chunks

    def prefill(self, group: Sequence[TokenSequence[KvT]], model: ServedModel[KvT]) -> list[Chunk[KvT]]:
        """The next tokens of a group of a model's sequences, in order. If there is no memory for the group, the model's
        partly prefilled sequences, which have theirs, continue: the first of the group may be waiting for them.
        """
        tokens = self._prefill_tokens_max
        chunks = self._prefill(group, tokens, []) or self._prefill(model.half_prefilled, tokens, [])
        self.blocked.discard(model.name)  # that is for mixed steps
        return chunks

    def _prefill(
        self, sequences: Sequence[TokenSequence[KvT]], tokens: int, others: list[TokenSequence[KvT]]
    ) -> list[Chunk[KvT]]:
        """As many sequences, in order, as `tokens` allow; the last one perhaps in part. One whose prefix another
        computes gives its place to that one; passed over are those whose cached prefix is being transferred. Neither
        the sequences of the step nor `others` are preempted for it.
        """
        chunks: list[Chunk[KvT]] = []
        for waiting in sequences:
            if tokens <= 0:
                break
            sequence, chosen = self._first_for(waiting), [chunk.sequence for chunk in chunks]
            if sequence is None or sequence in chosen:
                continue
            if not self._allocator.grow(sequence, sequence.kv_tokens, [*others, *chosen]):
                if not chunks:
                    self.blocked.add(sequence.model)
                break
            if _is_arriving(sequence):
                continue
            chunks.append(Chunk(sequence=sequence, count=min(tokens, sequence.pending)))
            tokens -= chunks[-1].count
        return chunks

    def _first_for(self, sequence: TokenSequence[KvT]) -> TokenSequence[KvT] | None:
        """The sequence whose prefill goes on in the place of this one: the one that computes its prefix, if another
        does. None: a cached prefix must be transferred before.
        """
        awaited = None if sequence.begun else self._kv.awaited(sequence.kv)
        if awaited is not None:
            return next((half for half in self._allocator.half_prefilled if half.kv is awaited), None)
        return None if _is_arriving(sequence) else sequence

    def decode(self, model: ServedModel[KvT]) -> list[Chunk[KvT]]:
        """One token of each sequence whose KV is on the device. KV in host memory is swapped in, in order; none takes
        memory that is being freed for one before it. The first may preempt others for it; those behind it only
        decoding sequences of other models, of no higher tier, and where that pays off in this slice.
        """
        ready: list[TokenSequence[KvT]] = []
        before, blocked, gave_back = 0, False, False
        for sequence in model.decoding[: self._batch_max]:
            if sequence.kv.location is HOST and not blocked:
                fits = before == 0 or self._kv.fits(sequence.kv, spare=before)
                keep = ready if fits else self._kept_for(sequence)
                blocked = keep is None or not self._allocator.swap_in(sequence, keep)
            if sequence.kv.location is DEVICE:
                if self._allocator.grow(sequence, len(sequence.tokens), ready):
                    ready.append(sequence)
                gave_back |= sequence.kv.location is not DEVICE
            before += sequence.kv.location in (DEVICE, SWAPPING_IN)
        self.gave_back = gave_back and not ready
        if ready:
            self.stuck.discard(model.name)
        elif gave_back or not (before or self._kv.freeing):
            self.stuck.add(model.name)
        return [Chunk(sequence=sequence, count=1) for sequence in ready]

    def _kept_for(self, sequence: TokenSequence[KvT]) -> list[TokenSequence[KvT]] | None:
        """Which sequences are not preempted for one that is swapped in behind others of its model; None: all."""
        if not pays_off(self._kv.swap_s([sequence.kv]), self._left_s()):
            return None
        here = self._allocator.decoding
        kept = [one for one in here if one.model == sequence.model or one.key[0] < sequence.key[0]]
        return kept + self._allocator.half_prefilled


def work_of(chunks: Sequence[Chunk[KvT]]) -> StepWork:
    """What a step computes that has not run yet."""
    prompts = [chunk for chunk in chunks if not chunk.sequence.prefilled]
    batch = [chunk for chunk in chunks if chunk.sequence.prefilled]
    return StepWork(
        tokens=sum([chunk.count for chunk in prompts]),
        squared_tokens=sum([chunk.squared_tokens for chunk in prompts]),
        context_tokens=sum([chunk.sequence.cached for chunk in batch]),
        batch=len(batch),
    )


def _is_arriving(sequence: TokenSequence[KvT]) -> bool:
    return sequence.kv.location is SWAPPING_IN
