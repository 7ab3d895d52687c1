"""One step of a turn in replayed time: weights, room for KV, and waiting for as long as the step would take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dataplane.engines.preemption import Place, choose_victim
from dataplane.engines.replay_memory import KvMemory, WeightsMemory
from dataplane.engines.replay_models import ReplayModel, ReplaySequence
from dataplane.engines.replay_settings import ReplaySettings
from dataplane.turns.schedule import Turn

IDLE_S = 0.001
"""How long a step waits when nothing can run and nothing is on its way."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next `count` tokens of a sequence that get KV, all in one step."""

    sequence: ReplaySequence
    count: int

    @property
    def squared_tokens(self) -> int:
        """What attention costs: the growth of the squared length."""
        return (self.sequence.cached + self.count) ** 2 - self.sequence.cached**2


class ReplaySteps:
    """Runs steps. `recompute` puts a sequence that lost its KV back into the prefill queue. `prefill_held`: the last
    step was a prefill that found no room for its KV.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        models: Mapping[str, ReplayModel],
        weights: WeightsMemory,
        kv: KvMemory,
        *,
        recompute: Callable[[ReplaySequence], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._settings = settings
        self._models = models
        self._weights = weights
        self._kv = kv
        self._recompute = recompute
        self._clock = clock
        self._sleep = sleep
        self._prefetched_s = float("-inf")
        self.prefill_held = False
        self.preemptions_total = 0
        self.recomputed_total = 0

    def run(self, turn: Turn, group: Sequence[ReplaySequence], now_s: float) -> list[ReplaySequence] | None:
        """Run a step of the turn: the sequences that get a token from it; none while the weights were arriving. None:
        it could not run for want of KV or of room for it, and waited.

        `group`: what to prefill, in order, in a prefill turn.
        """
        self.prefill_held = False
        model = self._models[turn.model]
        there_s = self._weights.bring(model.weights, now_s)
        assert there_s is not None, "no model is loaded that exceeds the slot"
        self._prefetch(turn, now_s)
        chunks = self._prefill_chunks(group, now_s) if turn.kind == "prefill" else self._decode_chunks(model, now_s)
        if there_s > now_s:
            self._sleep_until(there_s)
            return []
        if not chunks:
            held = turn.kind == "prefill" and not self._kv.leaving  # or what leaves for it would come back meanwhile
            self.wait(now_s)
            self.prefill_held = held
            return None
        self._spend(turn, model, chunks, now_s)
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
        return [chunk.sequence for chunk in chunks if chunk.sequence.cached == chunk.sequence.tokens]

    def wait(self, now_s: float) -> None:
        """Wait until the next transfer is over, or for a moment."""
        self.prefill_held = False
        next_move_s = self._kv.next_move_s
        self._sleep_until(now_s + IDLE_S if next_move_s is None else next_move_s)

    def _spend(self, turn: Turn, model: ReplayModel, chunks: list[Chunk], now_s: float) -> None:
        """Let the time of a step pass, and learn from what it really was."""
        if turn.kind == "prefill":
            tokens = sum(chunk.count for chunk in chunks)
            squared = sum(chunk.squared_tokens for chunk in chunks)
            self._sleep_until(now_s + model.latency.prefill_s(tokens, squared))
            model.estimate = model.estimate.observe_prefill(self._clock() - now_s, tokens, squared)
        else:
            context = sum(chunk.sequence.cached for chunk in chunks)
            self._sleep_until(now_s + model.latency.decode_s(context, len(chunks)))
            model.estimate = model.estimate.observe_decode(self._clock() - now_s, context, len(chunks))

    def _prefetch(self, turn: Turn, now_s: float) -> None:
        """Send for the next turn's weights while this one's run, once a turn."""
        following = self._models.get(turn.next_model or "")
        if not self._settings.prefetch or following is None or self._prefetched_s == turn.started_s:
            return
        if self._weights.bring(following.weights, now_s, keep=turn.model) is not None:
            self._prefetched_s = turn.started_s

    def _prefill_chunks(self, group: Sequence[ReplaySequence], now_s: float) -> list[Chunk]:
        """As many of the group, in order, as one step takes; the last one perhaps in part."""
        chunks: list[Chunk] = []
        room = self._settings.prefill_tokens_per_step_max
        for sequence in group:
            if room <= 0 or not self._grow(sequence, sequence.tokens + 1, [c.sequence for c in chunks], now_s):
                break
            chunks.append(Chunk(sequence=sequence, count=min(room, sequence.tokens - sequence.cached)))
            room -= chunks[-1].count
        return chunks

    def _decode_chunks(self, model: ReplayModel, now_s: float) -> list[Chunk]:
        """One token of each sequence whose KV is there. KV that is away is sent for, in order, while there is room:
        the first may drive others out for it, and nobody takes what is being made free for one before it.
        """
        ready: list[ReplaySequence] = []
        before, blocked = 0, False
        for sequence in model.decoding[: self._settings.batch_max]:
            kv = sequence.kv
            if kv.place is Place.AWAY and not blocked:
                spare_bytes = self._kv.free_bytes - before * kv.bytes_per_token
                if before == 0 or kv.moved_bytes <= spare_bytes:
                    take = partial(self._kv.swap_in, kv, now_s)
                    blocked = not self._make_room(take, sequence, ready, now_s)
                else:
                    blocked = True
            if kv.place is Place.HERE and self._grow(sequence, sequence.tokens, ready, now_s):
                ready.append(sequence)
            before += kv.place in (Place.HERE, Place.ARRIVING)
        return [Chunk(sequence=sequence, count=1) for sequence in ready]

    def _grow(self, sequence: ReplaySequence, tokens: int, keep: Sequence[ReplaySequence], now_s: float) -> bool:
        """Room for the KV of `tokens` tokens. False: not now; others leave, or it has left itself."""
        if self._make_room(lambda: self._kv.grow(sequence.kv, tokens), sequence, keep, now_s):
            return True
        if sequence.kv.place is Place.HERE and not self._kv.leaving:
            self._yield(sequence, now_s)  # nobody comes after it: it is the one to wait
        return False

    def _make_room(
        self, take: Callable[[], bool], sequence: ReplaySequence, keep: Sequence[ReplaySequence], now_s: float
    ) -> bool:
        while not take():
            if self._kv.leaving:
                return False
            here = (s for model in self._models.values() for s in model.decoding if s.kv.place is Place.HERE)
            victim = choose_victim(here, sequence, keep)
            if victim is None:
                return False
            self._yield(victim, now_s)
        return True

    def _yield(self, victim: ReplaySequence, now_s: float) -> None:
        self.preemptions_total += 1
        if not self._kv.swap_out(victim.kv, victim.cached, now_s):
            self.recomputed_total += 1
            self._recompute(victim)

    def _sleep_until(self, until_s: float) -> None:
        self._sleep(max(0.0, until_s - self._clock()))
