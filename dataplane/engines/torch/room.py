"""Room for KV in the arena: who makes way, and how. Nothing is lost: what leaves goes to host memory, or, when that is
full, is computed anew.
"""

from collections.abc import Callable, Iterable, Sequence

from dataplane.engines.preemption import Place, choose_victim
from dataplane.engines.torch.kv import KvStore
from dataplane.engines.torch.pooled import Pooled, half_prefilled, sequences_here
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.engines.torch.weights import WeightStore
from dataplane.memory.slabs import SlabArena


class Room:
    """Makes room. `recompute` puts a sequence that lost its KV back into the prefill queue."""

    def __init__(
        self,
        arena: SlabArena,
        weights: WeightStore,
        kv: KvStore,
        *,
        recompute: Callable[[TokenSequence], None],
        hands_over: bool,
    ) -> None:
        self._arena = arena
        self._weights = weights
        self._kv = kv
        self._recompute = recompute
        self._hands_over = hands_over
        self.preemptions_total = 0
        self.recomputed_total = 0

    def grow(
        self, sequence: TokenSequence, tokens: int, models: Iterable[Pooled], keep: Sequence[TokenSequence] = ()
    ) -> bool:
        """Blocks for `tokens` tokens of a sequence. False: not now; others leave, or it has left itself."""
        if self._make(lambda: self._kv.grow(sequence.kv, tokens), sequence, models, keep):
            return True
        if sequence.kv.place is Place.HERE and sequence.cached and not self._kv.leaving:
            self._yield(sequence)  # nobody comes after it: it is the one to wait
        return False

    def bring(self, sequence: TokenSequence, models: Iterable[Pooled], keep: Sequence[TokenSequence]) -> bool:
        """Send for KV that is AWAY. False: there is no room now."""
        return self._make(lambda: self._kv.swap_in(sequence.kv), sequence, models, keep)

    def _make(
        self,
        take: Callable[[], bool],
        sequence: TokenSequence,
        models: Iterable[Pooled],
        keep: Sequence[TokenSequence],
    ) -> bool:
        while not take():
            if self._weights.evict_idle_above(self._arena.weights_slabs, keep=sequence.model):
                continue
            if self._kv.leaving:
                return False
            victim = choose_victim(sequences_here(models), sequence, keep)
            if victim is not None:
                if not self._yield(victim):
                    return False
                continue
            half = choose_victim(half_prefilled(models), sequence, keep)
            if half is not None and half.key > sequence.key:
                self._drop(half)
                continue
            # At last the model's own weights, if they borrowed slabs of KV: the next step brings them to the reserve.
            self._weights.evict_idle_above(self._arena.weights_slabs, keep=None)
            return False
        return True

    def _yield(self, victim: TokenSequence) -> bool:
        """Have a sequence make way. False if host memory is full and it is on its way out: it will leave by itself."""
        if not self._kv.swap_out(victim.kv, victim.cached):
            if self._hands_over:
                return False
            self._drop(victim)
        self.preemptions_total += 1
        return True

    def _drop(self, victim: TokenSequence) -> None:
        self.recomputed_total += 1
        self._kv.drop(victim.kv)
        self._recompute(victim)
