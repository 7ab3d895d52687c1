"""Allocation of KV memory on a slot, and preemption. The rules of every engine. No request is lost: preempted KV is
swapped to host memory, or recomputed if that is full.

Cached prefixes that no sequence uses count as free memory: the KV memory evicts them itself, and the requester waits
while they are copied to host memory. When free memory is too small, the engine's policy chooses the action
(`OnShortage`). Memory is freed in this order:

1. memory that is not KV: weight layers that can be offloaded ("remap"), then weights in slabs borrowed from KV;
2. unless the requester waits ("refuse"), KV of decoding sequences (`choose_victim`): swapped to host memory ("swap") or
   dropped ("recompute");
3. KV of partly prefilled sequences after the requester in the order of service. Their prefill starts over. Those before
   it keep theirs, unless only the requester may run: in rounds, a group that was begun is prefilled to its end.

A resumed sequence makes at least one token before it can be preempted again; this prevents livelock between two
sequences that do not fit together. A sequence that gets no memory waits; if it has KV and there is no victim, it is
preempted itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from dataplane.engines.core.kv import DEVICE, KvMemory, KvT
from dataplane.engines.core.pressure import OnShortage, Shortage, always_swap
from dataplane.engines.core.remapping.actions import Action
from dataplane.engines.core.request_table import RequestTable
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel


class Ranked(Protocol):
    """A sequence of a model. `key`: its rank in the order of service; the smaller goes first."""

    @property
    def model(self) -> str: ...

    @property
    def key(self) -> tuple[int, int]: ...


RankedT = TypeVar("RankedT", bound=Ranked)


def choose_victim(
    candidates: Iterable[RankedT],
    requester: RankedT,
    keep: Iterable[RankedT] = (),
    *,
    idle_s: Callable[[str], float] = lambda _: 0.0,
) -> RankedT | None:
    """The sequence to preempt for the requester: of other models' sequences one of the lowest tier, of these one of the
    model that has its turn last, and of these the last in the order of service; else the last of its own model's that
    come after it. None if there is none. `idle_s`: seconds until a model's turn.
    """
    kept = {id(sequence) for sequence in keep} | {id(requester)}
    others = (
        sequence
        for sequence in candidates
        if id(sequence) not in kept and (sequence.model != requester.model or sequence.key > requester.key)
    )

    def rank(one: RankedT) -> tuple[bool, int, float, tuple[int, int]]:
        return one.model != requester.model, one.key[0], idle_s(one.model), one.key

    return max(others, key=rank, default=None)


class KvAllocator(Generic[KvT]):
    """Allocates KV memory. `reclaim` evicts weights from slabs borrowed from KV, of any model but the named one (None:
    of every model), and returns whether it did; `on_shortage` chooses the action; `idle_s`: seconds until a model's
    turn. A `prefill_only` slot never drops KV of finished prefills: their KV transfer frees it. `by_deadlines`: models
    share the time so; else in rounds.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel[KvT]],
        kv: KvMemory[KvT],
        requests: RequestTable[KvT],
        *,
        prefill_only: bool,
        reclaim: Callable[[str | None], bool],
        on_shortage: OnShortage = always_swap,
        idle_s: Callable[[str], float] = lambda _: 0.0,
        by_deadlines: bool = False,
    ) -> None:
        self._models = models
        self._kv = kv
        self._requests = requests
        self._prefill_only = prefill_only
        self._reclaim = reclaim
        self._on_shortage = on_shortage
        self._idle_s = idle_s
        self._by_deadlines = by_deadlines
        self.preemptions_total = 0
        self.recomputed_total = 0

    @property
    def decoding(self) -> list[TokenSequence[KvT]]:
        """Sequences of all models past their prefill whose KV is on the device."""
        return [s for model in self._models.values() for s in model.decoding_here]

    @property
    def half_prefilled(self) -> list[TokenSequence[KvT]]:
        """Partly prefilled sequences of all models."""
        return [s for model in self._models.values() for s in model.half_prefilled]

    def grow(self, sequence: TokenSequence[KvT], tokens: int, keep: Sequence[TokenSequence[KvT]] = ()) -> bool:
        """Allocate memory for the KV of `tokens` tokens of a sequence, without preempting those in `keep`. False: not
        yet, because others are being swapped out, or because it was preempted itself.
        """
        allocated, action = self._kv.grow(sequence.kv, tokens), None
        if not allocated:
            allocated, action = self._allocate(lambda: self._kv.grow(sequence.kv, tokens), sequence, tokens, keep)
        if allocated:
            if not sequence.begun:
                sequence.cached = sequence.reused = self._kv.reused_tokens(sequence.kv)
            self._requests.begin(sequence)
            return True
        if sequence.prefilled and sequence.kv.location is DEVICE and not self._kv.freeing:
            self._preempt(sequence, action)
        return False

    def swap_in(self, sequence: TokenSequence[KvT], keep: Sequence[TokenSequence[KvT]]) -> bool:
        """Start the transfer of KV from the HOST; False if free memory is too small now."""
        started, _ = self._allocate(lambda: self._kv.swap_in(sequence.kv), sequence, sequence.cached, keep)
        if started:
            sequence.resumed_at = len(sequence.tokens)
        return started

    def evict(self, matches: Callable[[KvT], bool]) -> None:
        """Preempt the sequences whose KV occupies memory that weights need. Transfers under way continue."""
        for model in self._models.values():
            for sequence in [s for s in model.begun if s.kv.location is DEVICE and matches(s.kv)]:
                if sequence.prefilled:
                    self._preempt(sequence, None)
                else:
                    self._drop(sequence)

    def _allocate(
        self,
        attempt: Callable[[], bool],
        sequence: TokenSequence[KvT],
        tokens: int,
        keep: Sequence[TokenSequence[KvT]],
    ) -> tuple[bool, Action | None]:
        """Free memory until `attempt` succeeds: True. Else False, and the action that was chosen."""
        while not attempt():
            if self._kv.evicting:
                return False, None
            decoding = self.decoding
            able = [s for s in decoding if not s.just_resumed]
            victim = choose_victim(able, sequence, keep, idle_s=self._idle_s)
            action = None
            if not self._kv.freeing:
                preempts_itself = sequence.prefilled and sequence.kv.location is DEVICE
                preempted = sequence if victim is None and preempts_itself else victim
                action = self._on_shortage(Shortage(sequence=sequence, tokens=tokens, victim=preempted))
            if action == "remap" or self._reclaim(sequence.model):
                continue
            if self._kv.freeing or action == "refuse":
                return False, action
            if victim is not None:
                if not self._preempt(victim, action):
                    return False, action
                continue
            alone = not (sequence.prefilled or decoding or self._by_deadlines)
            half = self._half_prefilled_after(sequence, keep, alone=alone)
            if half is None:
                self._reclaim(None)  # its own weights are loaded into the weight region in the next step
                return False, action
            self._drop(half)
        return True, None

    def _half_prefilled_after(
        self, sequence: TokenSequence[KvT], keep: Sequence[TokenSequence[KvT]], *, alone: bool
    ) -> TokenSequence[KvT] | None:
        """`alone`: the sequence waits for its prefill, no KV of a decode is on the device, and the scheduler puts that
        prefill first, so that nothing else can run. By deadlines others can, and would make it start over in turn.
        """
        half = choose_victim(self.half_prefilled, sequence, keep)
        return half if half is not None and (alone or half.key > sequence.key) else None

    def _preempt(self, victim: TokenSequence[KvT], action: Action | None) -> bool:
        """Swap out or drop. False if host memory is full on a `prefill_only` slot, whose KV transfers will free it."""
        drops = action == "recompute" and not self._prefill_only
        if drops or not self._kv.swap_out(victim.kv, victim.cached):
            if self._prefill_only:
                return False
            self._drop(victim)
        self.preemptions_total += 1
        return True

    def _drop(self, victim: TokenSequence[KvT]) -> None:
        self.recomputed_total += 1
        self._requests.queue(victim)
