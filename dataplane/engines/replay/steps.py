"""One step of a turn in replayed time: weights, KV, and waiting for as long as the step would take."""

from collections.abc import Callable, Mapping, Sequence

from dataplane.engines.core.sequences import Chunk
from dataplane.engines.core.step_batches import StepBatches
from dataplane.engines.replay.memory import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.models import ReplayModel, ReplaySequence
from dataplane.engines.replay.settings import ReplaySettings
from dataplane.engines.replay.weights import WeightsMemory
from dataplane.scheduling.schedule import Turn

IDLE_S = 0.001
"""How long a step waits when nothing can run and nothing is on its way."""


class ReplaySteps:
    """Runs steps. One that cannot run waits for what is on its way, or for a moment."""

    def __init__(
        self,
        settings: ReplaySettings,
        models: Mapping[str, ReplayModel],
        weights: WeightsMemory,
        kv: ReplayKvMemory,
        step_batches: StepBatches[SequenceKv],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        make_way: Callable[[ReplayModel], None],
    ) -> None:
        """`make_way` has KV leave layers whose room a model needs to come in."""
        self._make_way = make_way
        self._settings = settings
        self._models = models
        self._weights = weights
        self._kv = kv
        self._step_batches = step_batches
        self._clock = clock
        self._sleep = sleep
        self._prefetched_s = float("-inf")

    def run(
        self, turn: Turn, model: ReplayModel, group: Sequence[ReplaySequence], now_s: float
    ) -> list[ReplaySequence] | None:
        """Run a step of the turn: the sequences that get a token from it; none while the weights were arriving. None:
        it could not run for want of KV, or of room for it or for the weights. `group`: what to prefill, in order, in a
        prefill turn.
        """
        there_s = self.bring(turn, model, now_s)
        if there_s is None:
            return None
        batches = self._step_batches
        chunks = batches.prefill(group, model) if turn.kind == "prefill" else batches.decode(model)
        if there_s > now_s:
            self.sleep_until(there_s)
            return []
        if not chunks or self._weights.resident(model.name) is None:  # who lends layers may have made way meanwhile
            self.wait(now_s)
            return None
        self._spend(turn, model, chunks, now_s)
        makers = [chunk.sequence for chunk in chunks if chunk.makes_token]
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
        return makers

    def bring(self, turn: Turn, model: ReplayModel, now_s: float) -> float | None:
        """Send for the turn's weights, and for those of the next turn; when the former are there. None: KV had to make
        way for them, and some time has passed.
        """
        there_s = self._weights.bring(model.weights, now_s, strayed_bytes=self._kv.strayed_bytes)
        if there_s is None:
            self._make_way(model)
            self.wait(now_s)
        else:
            self._prefetch(turn, now_s)
        return there_s

    def wait(self, now_s: float) -> None:
        """Wait until the next transfer is over, or for a moment."""
        next_move_s = self._kv.next_move_s
        self.sleep_until(now_s + IDLE_S if next_move_s is None else next_move_s)

    def _spend(self, turn: Turn, model: ReplayModel, chunks: list[Chunk[SequenceKv]], now_s: float) -> None:
        """Let the time of a step pass, and learn from what it really was if it waited for no layers."""
        resident = self._weights.resident(model.name)
        whole = resident is not None and resident.is_whole(now_s)
        if turn.kind == "prefill":
            tokens = sum([chunk.count for chunk in chunks])
            squared = sum([chunk.squared_tokens for chunk in chunks])
            compute_s = model.latency.prefill_s(tokens, squared)
            self.sleep_until(self._weights.ends_s(model.weights, compute_s, now_s))
            if whole:
                model.observe_prefill(self._clock() - now_s, tokens, squared)
        else:
            context = sum([chunk.sequence.cached for chunk in chunks])
            compute_s = model.latency.decode_s(context, len(chunks))
            self.sleep_until(self._weights.ends_s(model.weights, compute_s, now_s))
            if whole:
                model.observe_decode(self._clock() - now_s, context, len(chunks))

    def _prefetch(self, turn: Turn, now_s: float) -> None:
        """Send for the next turn's weights while this one's run, once a turn."""
        following = self._models.get(turn.next_model or "")
        if not self._settings.prefetch or following is None or self._prefetched_s == turn.started_s:
            return
        strayed_bytes = self._kv.strayed_bytes
        if self._weights.bring(following.weights, now_s, keep=turn.model, strayed_bytes=strayed_bytes) is not None:
            self._prefetched_s = turn.started_s

    def sleep_until(self, until_s: float) -> None:
        """Wait until a moment."""
        self._sleep(max(0.0, until_s - self._clock()))
