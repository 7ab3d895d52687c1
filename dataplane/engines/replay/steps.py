"""One step of a turn in replayed time: weights, KV, and waiting for as long as the step would take."""

from collections.abc import Callable, Mapping, Sequence

from dataplane.engines.core.sequences import Chunk
from dataplane.engines.core.step_batches import StepBatches, work_of
from dataplane.engines.replay.kv import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.models import ReplayModel, ReplaySequence, adapters_of
from dataplane.engines.replay.settings import ReplaySettings
from dataplane.engines.replay.weights import WeightsMemory
from dataplane.scheduling.schedule import Turn

IDLE_S = 0.001
"""How long a step waits when nothing can run and no transfer is under way."""


class ReplaySteps:
    """Runs steps. A step that cannot run waits for the next transfer, or for a moment. `evict_kv` evicts KV from
    memory that a model needs to be loaded.
    """

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
        evict_kv: Callable[[ReplayModel], None],
    ) -> None:
        self._evict_kv = evict_kv
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
        """Run a step of the turn and return the sequences that get a token from it; none while weights are loaded.
        None: it could not run because KV or memory was missing. `group`: the prompts of the turn, in order.
        """
        loaded_s = self.load_weights(turn, model, now_s)
        if loaded_s is None:
            return None
        chunks = self._step_batches.form(turn, model, group)
        if loaded_s > now_s:
            self.sleep_until(loaded_s)
            return []
        if not chunks or self._weights.resident(model.name) is None:  # a model with offloaded layers may be evicted
            self.wait(now_s)
            return None
        self._compute(model, chunks, now_s)
        makers = [chunk.sequence for chunk in chunks if chunk.makes_token]
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
            self._kv.computed(chunk.sequence.kv, chunk.sequence.cached)
        return makers

    def load_weights(self, turn: Turn, model: ReplayModel, now_s: float) -> float | None:
        """Load the turn's weights and prefetch the next model's; the time at which the former are loaded. None: KV had
        to be evicted for them, and some time has passed.
        """
        loaded_s = self._weights.load(model.weights, now_s, out_of_region_bytes=self._kv.out_of_region_bytes)
        if loaded_s is None:
            self._evict_kv(model)
            self.wait(now_s)
        else:
            self._prefetch(turn, now_s)
        return loaded_s

    def wait(self, now_s: float) -> None:
        """Wait until the next transfer ends, or for a moment."""
        next_move_s = self._kv.next_move_s
        self.sleep_until(now_s + IDLE_S if next_move_s is None else next_move_s)

    def _compute(self, model: ReplayModel, chunks: list[Chunk[SequenceKv]], now_s: float) -> None:
        """Let the time of a step pass, and update the estimate, which is of steps without adapters, by it if the step
        waited for no layers.
        """
        resident = self._weights.resident(model.name)
        whole = resident is not None and resident.is_whole(now_s)
        work = work_of(chunks)
        factor = self._settings.adapters_factor(adapters_of(chunk.sequence for chunk in chunks))
        self.sleep_until(self._weights.ends_s(model.weights, factor * model.latency.step_s(work), now_s))
        if whole:
            model.observe_step((self._clock() - now_s) / factor, work)

    def _prefetch(self, turn: Turn, now_s: float) -> None:
        """Load the next model's weights while this one runs, once a turn."""
        following = self._models.get(turn.next_model or "")
        if not self._settings.prefetch or following is None or self._prefetched_s == turn.started_s:
            return
        kv_bytes = self._kv.out_of_region_bytes
        if self._weights.load(following.weights, now_s, keep=turn.model, out_of_region_bytes=kv_bytes) is not None:
            self._prefetched_s = turn.started_s

    def sleep_until(self, until_s: float) -> None:
        self._sleep(max(0.0, until_s - self._clock()))
