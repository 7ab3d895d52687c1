"""Room for KV on a slot: who makes way, and how. The rules of every engine. Nothing is lost: what leaves goes to host
memory, or, when that is full, is computed anew.

Where room is short, the engine's policy is asked for the way out (`Relieve`). There make way, in this order:

1. what is no KV: layers that models can do without ("remap"), then weights that borrowed room;
2. unless who asks is to wait ("refuse"), sequences that decode, of other models first, the last in the order of service
   (`choose_victim`): to host memory ("swap"), or to be computed anew ("recompute");
3. sequences in the midst of their prefill that come after the one that asks. They begin again from their first token.

Who comes back makes a token before it leaves again, so that two that never fit together both come to an end. One that
finds no room waits; one that holds some, and that nobody makes way for, leaves itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from dataplane.engines.core.kv import KvLocation, KvMemory, KvT
from dataplane.engines.core.pressure import Relieve, Shortage, always_swap
from dataplane.engines.core.remapping.relief import Way
from dataplane.engines.core.request_table import RequestTable
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel


class Ranked(Protocol):
    """A sequence of some model. `key`: its place in the order of service; the smaller goes first."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of service."""


RankedT = TypeVar("RankedT", bound=Ranked)


def choose_victim(candidates: Iterable[RankedT], requester: RankedT, keep: Iterable[RankedT] = ()) -> RankedT | None:
    """Whose KV leaves so that the requester's may grow or come in: of other models' sequences the last in the order of
    service, else the last of its own model's that come after it. None: nobody has to make way for it.
    """
    kept = {id(sequence) for sequence in keep} | {id(requester)}
    others = (
        sequence
        for sequence in candidates
        if id(sequence) not in kept and (sequence.model != requester.model or sequence.key > requester.key)
    )
    return max(others, key=lambda sequence: (sequence.model != requester.model, sequence.key), default=None)


class Room(Generic[KvT]):
    """Makes room. `take_back` has weights give back what they borrowed, True if some did: those of any other model than
    the named one, or, for None, of every model; `relieve` chooses the way out. A slot that `hands_over` never drops
    what is past its prefill: that leaves by itself.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel[KvT]],
        kv: KvMemory[KvT],
        requests: RequestTable[KvT],
        *,
        hands_over: bool,
        take_back: Callable[[str | None], bool],
        relieve: Relieve = always_swap,
    ) -> None:
        self._models = models
        self._kv = kv
        self._requests = requests
        self._hands_over = hands_over
        self._take_back = take_back
        self._relieve = relieve
        self.preemptions_total = 0
        self.recomputed_total = 0

    def grow(self, sequence: TokenSequence[KvT], tokens: int, keep: Sequence[TokenSequence[KvT]] = ()) -> bool:
        """Room for the KV of `tokens` tokens of a sequence. False: not now; others leave, or it has left itself.
        Those in `keep` stay.
        """
        made, way = self._kv.grow(sequence.kv, tokens), None
        if not made:
            made, way = self._make(lambda: self._kv.grow(sequence.kv, tokens), sequence, tokens, keep)
        if made:
            self._requests.begin(sequence)
            return True
        if sequence.prefilled and sequence.kv.location is KvLocation.DEVICE and not self._kv.freeing:
            self._yield(sequence, way)  # nobody comes after it: it is the one to wait
        return False

    def bring(self, sequence: TokenSequence[KvT], keep: Sequence[TokenSequence[KvT]]) -> bool:
        """Send for KV in host memory. False: there is no room now."""
        made, _ = self._make(lambda: self._kv.swap_in(sequence.kv), sequence, sequence.cached, keep)
        if made:
            sequence.came_back_at = len(sequence.tokens)
        return made

    def clear(self, in_the_way: Callable[[KvT], bool]) -> None:
        """Have KV make way for weights. What is on its way already goes on."""
        for model in self._models.values():
            for sequence in [s for s in model.begun if s.kv.location is KvLocation.DEVICE and in_the_way(s.kv)]:
                if sequence.prefilled:
                    self._yield(sequence, None)
                else:
                    self._drop(sequence)

    def _make(
        self,
        take: Callable[[], bool],
        sequence: TokenSequence[KvT],
        tokens: int,
        keep: Sequence[TokenSequence[KvT]],
    ) -> tuple[bool, Way | None]:
        """Whether there is room, taken, and else the way that was chosen."""
        while not take():
            decoding = [s for model in self._models.values() for s in model.decoding_here]
            victim = choose_victim([s for s in decoding if not s.just_came_back], sequence, keep)
            way = None
            if not self._kv.freeing:
                leaves_itself = sequence.prefilled and sequence.kv.location is KvLocation.DEVICE
                who = sequence if victim is None and leaves_itself else victim
                way = self._relieve(Shortage(sequence=sequence, tokens=tokens, victim=who))
            if way == "remap" or self._take_back(sequence.model):
                continue
            if self._kv.freeing or way == "refuse":
                return False, way
            if victim is not None:
                if not self._yield(victim, way):
                    return False, way
                continue
            half = self._half_prefilled_after(sequence, keep, first=not (sequence.prefilled or decoding))
            if half is None:
                self._take_back(None)  # its own weights come to the reserve in the next step
                return False, way
            self._drop(half)
        return True, None

    def _half_prefilled_after(
        self, sequence: TokenSequence[KvT], keep: Sequence[TokenSequence[KvT]], *, first: bool
    ) -> TokenSequence[KvT] | None:
        """`first`: it is to be prefilled and nobody decodes, so that nothing goes on but what the turn policy puts
        first, which is this one.
        """
        halves = (s for model in self._models.values() for s in model.half_prefilled)
        half = choose_victim(halves, sequence, keep)
        return half if half is not None and (first or half.key > sequence.key) else None

    def _yield(self, victim: TokenSequence[KvT], way: Way | None) -> bool:
        """Have a sequence make way. False if host memory is full and it is on its way out: it will leave by itself."""
        drops = way == "recompute" and not self._hands_over
        if drops or not self._kv.swap_out(victim.kv, victim.cached):
            if self._hands_over:
                return False
            self._drop(victim)
        self.preemptions_total += 1
        return True

    def _drop(self, victim: TokenSequence[KvT]) -> None:
        self.recomputed_total += 1
        self._requests.queue(victim)
